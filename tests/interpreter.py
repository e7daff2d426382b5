"""Triton's interpreter patches its language in every call of a device function: once a launch will do. It
makes a table of all number formats for each that it looks up: once for each format will do."""

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
    look_up: Callable[[Any], Any] | None = getattr(interpreter, "_get_np_dtype", None)
    if look_up is None:
        return
    # By the name of a number or pointer, which is that of a block's elements.
    formats: dict[str, Any] = {}

    def look_up_once(of: Any) -> Any:
        name = of.scalar.name
        if name not in formats:
            formats[name] = look_up(of)
        return formats[name]

    interpreter._get_np_dtype = look_up_once
