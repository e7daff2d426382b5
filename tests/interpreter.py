"""Triton's interpreter, quicker, with the same results. It patches its language in every call of a device
function: once a launch will do. It makes a table of all number formats for each that it looks up, and looks
for all built-in functions: once will do. It reduces and scans a block number by number: slice by slice, along
the axis, will do. It describes the shape of every block anew: once will do. It works out whether integers
overflow, then tells nobody: not at all will do. It compares shapes number by number and formats by their
names: where they are the same ones, a look will do."""

import inspect
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from typing import Any

import numpy as np


def make_quicker() -> None:
    """Most of the time of most interpreted kernels goes into that otherwise. Where Triton is not there, or
    has its interpreter otherwise, all stays as it is."""
    try:
        interpreter: Any = import_module("triton.runtime.interpreter")
    except ImportError:
        return
    _patch_once_a_launch(interpreter)
    _find_builtins_once(interpreter)
    _look_up_once(interpreter)
    _combine_slices(interpreter)
    _describe_shapes_once(interpreter)
    _no_check_without_effect(interpreter)
    _compare_once(interpreter)


def _patch_once_a_launch(interpreter: Any) -> None:
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


def _find_builtins_once(interpreter: Any) -> None:
    patch_attr: Callable[..., None] | None = getattr(interpreter, "_patch_attr", None)
    semantic: Any = getattr(interpreter, "interpreter_semantic", None)
    if patch_attr is None or semantic is None or not hasattr(interpreter, "_patch_builtin"):
        return
    core = interpreter.tl.core
    is_builtin = core.is_builtin
    # What a built-in function does before itself: look whether it is given a semantic.
    looks = core.builtin(is_builtin).__code__

    def with_semantic(member: Any) -> Any:
        of = member.__wrapped__ if getattr(member, "__code__", None) is looks else member

        def given(*args: Any, **named: Any) -> Any:
            named["_semantic"] = semantic
            return of(*args, **named)

        return given

    # By the package or class: names of its built-in functions. None is patched when it is first looked at.
    names: dict[Any, list[str]] = {}

    def patch_builtin(of: Any, builder: Any, scope: Any) -> None:
        if of not in names:
            names[of] = [name for name, member in inspect.getmembers(of) if is_builtin(member)]
        for name in names[of]:
            member = getattr(of, name)
            if is_builtin(member):
                scope.set_attr(of, name, with_semantic(member))

    interpreter._patch_builtin = patch_builtin


def _look_up_once(interpreter: Any) -> None:
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


def _describe_shapes_once(interpreter: Any) -> None:
    core = interpreter.tl.core
    make_type, make_tensor = core.block_type.__init__, core.tensor.__init__
    # By format and shape: what a type of blocks knows but its format.
    types: dict[tuple[Any, ...], dict[str, Any]] = {}
    # By a shape of those, which is kept here: what a tensor knows but its numbers and its type.
    tensors: dict[int, tuple[Any, dict[str, Any]]] = {}
    numbers: dict[str, Any] = {}

    def described_type(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = [size.value if type(size) is core.constexpr else size for size in shape]
        if not all(type(size) is int for size in sizes):
            make_type(self, element_ty, shape)
            return
        known = types.get((element_ty.name, *sizes))
        if known is None:
            make_type(self, element_ty, shape)
            self.sizes = tuple(sizes)
            known = {name: value for name, value in vars(self).items() if name != "element_ty"}
            types[element_ty.name, *sizes] = known
            return
        self.element_ty = element_ty
        vars(self).update(known)

    def described_tensor(self: Any, handle: Any, type: Any) -> None:
        shape = type.shape if type.is_block() else None
        known = numbers if shape is None else tensors.get(id(shape), (None, None))[1]
        if known:
            self.handle, self.type, self.dtype = handle, type, type.scalar
            vars(self).update(known)
            return
        make_tensor(self, handle, type)
        known = {name: value for name, value in vars(self).items() if name not in ("handle", "type", "dtype")}
        if shape is None:
            numbers.update(known)
        else:
            tensors[id(shape)] = shape, known

    core.block_type.__init__ = described_type
    core.tensor.__init__ = described_tensor


def _compare_once(interpreter: Any) -> None:
    """Blocks of one shape, and numbers, are broadcast to nothing; what two formats are computed in is worked
    out once."""
    core, semantic = interpreter.tl.core, getattr(interpreter, "TritonSemantic", None)
    broadcast = getattr(semantic, "broadcast_impl_value", None)
    computed_in = getattr(semantic, "computation_type_impl", None)
    if broadcast is None or computed_in is None:
        return
    same = core.dtype.__eq__
    # By the names of both formats, and whether either is of a plain number.
    formats: dict[tuple[Any, ...], Any] = {}

    def broadcast_if_other(self: Any, lhs: Any, rhs: Any) -> Any:
        ours, theirs = getattr(lhs.type, "sizes", None), getattr(rhs.type, "sizes", None)
        if ours != theirs or (ours is None and (lhs.type.is_block() or rhs.type.is_block())):
            return broadcast(self, lhs, rhs)
        return lhs, rhs

    def computed_in_once(
        self: Any, a: Any, a_is_number: bool, b: Any, b_is_number: bool, divided: bool
    ) -> Any:
        key = a.name, a_is_number, b.name, b_is_number, divided
        if key not in formats:
            formats[key] = computed_in(self, a, a_is_number, b, b_is_number, divided)
        return formats[key]

    semantic.broadcast_impl_value = broadcast_if_other
    semantic.computation_type_impl = computed_in_once
    core.dtype.__eq__ = lambda self, other: self is other or same(self, other)


def _no_check_without_effect(interpreter: Any) -> None:
    """An overflow is told by an assertion of the device's, which there is in debugging only."""
    builder = getattr(interpreter, "interpreter_builder", None)
    options = getattr(builder, "options", None)
    if builder is not None and hasattr(options, "sanitize_overflow") and hasattr(options, "debug"):
        builder.options = replace(options, sanitize_overflow=options.debug)


def _combine_slices(interpreter: Any) -> None:
    reduce_ops, scan_ops = (getattr(interpreter, name, None) for name in ("ReduceOps", "ScanOps"))
    reduce = getattr(reduce_ops, "generic_reduce", None)
    scan = getattr(scan_ops, "generic_scan", None)
    if reduce is None or scan is None:
        return

    def reduce_slices(self: Any, blocks: tuple[Any, ...]) -> list[Any]:
        if not _has_slices(self.axis, blocks):
            return list(reduce(self, blocks))
        totals = [steps[-1] for steps in _steps(self, blocks)]
        if self.keep_dims:
            totals = [np.expand_dims(total, self.axis) for total in totals]
        return [self.to_tensor(total, block.dtype) for total, block in zip(totals, blocks, strict=True)]

    def scan_slices(self: Any, blocks: tuple[Any, ...]) -> list[Any]:
        if not _has_slices(self.axis, blocks):
            return list(scan(self, blocks))
        found = [np.stack(steps, self.axis) for steps in _steps(self, blocks)]
        return [self.to_tensor(one, block.dtype) for one, block in zip(found, blocks, strict=True)]

    reduce_ops.generic_reduce = reduce_slices
    scan_ops.generic_scan = scan_slices


def _has_slices(axis: int | None, blocks: tuple[Any, ...]) -> bool:
    dimensions = len(blocks[0].handle.data.shape)
    return axis is not None and dimensions > 1 and 0 <= axis < dimensions


def _steps(ops: Any, blocks: tuple[Any, ...]) -> list[list[Any]]:
    """For each block its first slice, then what has been combined from there on to each further one: in the
    order of the interpreter, and rounded to the block's format after every step as there."""
    slices = [list(np.moveaxis(block.handle.data, ops.axis, 0)) for block in blocks]
    steps = [[first] for first, *_ in slices]
    for each in zip(*(rest for _, *rest in slices), strict=True):
        both = (*(done[-1] for done in steps), *each)
        given = (ops.to_tensor(data, block.dtype) for data, block in zip(both, blocks * 2, strict=True))
        combined = ops.combine_fn.fn(*given)
        combined = combined if isinstance(combined, tuple) else (combined,)
        for done, one in zip(steps, combined, strict=True):
            data = one.handle.data if hasattr(one, "handle") else one
            done.append(np.broadcast_to(data, done[0].shape).astype(done[0].dtype))
    return steps
