"""Triton's interpreter patches its language in every call of a device function: once a launch will do."""

from collections.abc import Callable
from importlib import import_module
from typing import Any


def patch_once_a_launch() -> None:
    """Half the time of most interpreted kernels goes into that otherwise. Where Triton is not there, or has
    its interpreter otherwise, all stays as it is."""
    try:
        interpreter: Any = import_module("triton.runtime.interpreter")
    except ImportError:
        return
    patch: Callable[[Any], Any] | None = getattr(interpreter, "_patch_lang", None)
    scope: Any = getattr(interpreter, "_LangPatchScope", None)
    restore: Callable[[Any], None] | None = getattr(scope, "restore", None)
    if patch is None or restore is None:
        return
    # Modules whose language is patched, until the launch restores it.
    patched: set[int] = set()

    def patch_once(function: Any) -> Any:
        module = id(function.__globals__)
        if module in patched:
            return scope()
        patched.add(module)
        return patch(function)

    def restore_all(self: Any) -> None:
        patched.clear()
        restore(self)

    interpreter._patch_lang = patch_once
    scope.restore = restore_all
