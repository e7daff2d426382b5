"""simcore predicts how long LLM inference takes, by discrete-event simulation of what a real machine runs.

result = simcore.run("scenario.yaml")        see simcore.api
"""

import warnings
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from simcore.api import Result, compare, run

__all__ = ["Result", "compare", "run"]


def __getattr__(name: str) -> Any:
    """Loads the Python API on first access, with the compiled core if there is one."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from simcore import compiled  # noqa: PLC0415

    if not compiled.imported() and (refused := compiled.use()):
        warnings.warn(refused, stacklevel=2)
    from simcore import api  # noqa: PLC0415

    return getattr(api, name)
