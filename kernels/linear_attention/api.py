"""Linear attention for users: a call that takes the cheapest method, and a benchmark for a new method.

    out_i = q_i S_i,  S_i = gamma S_(i-1) + k_i^T v_i     S_(-1) = state or 0, gamma = decay of the head or 1

"auto" takes the method with the lowest predicted price among the methods that fit into the device's memory. A
method without a Triton kernel for the tensors runs, and is priced, as its stream of torch ops.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from statistics import median, quantiles
from time import perf_counter
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from simcore.devices.price import pricer
from simcore.devices.profile import load_profile, profile_names
from simcore.devices.spec import DeviceSpec, device_names, load_device
from simcore.kernels.kernel import DTYPES
from simcore.kernels.linear_attention import LINEAR_ATTENTION
from simcore.kernels.linear_attention.dispatch import TRITON, is_taken
from simcore.kernels.linear_attention.inputs import inputs
from simcore.kernels.linear_attention.naive import naive
from simcore.kernels.linear_attention.terms import accumulated_in
from simcore.ops.linear_attention import (
    METHODS,
    TORCH_METHODS,
    linear_attention,
    linear_attention_step,
    memory_bytes,
)
from simcore.ops.op import Op, Price, Pricer

NAMES: Mapping[torch.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}
# Shapes whose ops and choices are cached.
REMEMBERED = 256
# Largest error of a correct method, over the largest output: the rounding error at these lengths.
TOLERANCES: Mapping[torch.dtype, float] = {
    torch.float64: 1e-10,
    torch.float32: 1e-5,
    torch.bfloat16: 2e-2,
    torch.float16: 4e-3,
}


@dataclass(frozen=True, slots=True)
class Choice:
    """The method that "auto" takes, and why: the price of each method that fits, the bytes of each method."""

    method: str
    device: str
    prices: Mapping[str, Price]
    memory_bytes: Mapping[str, float]

    def __str__(self) -> str:
        rows = [f"{self.method} on {self.device}, of:"]
        for method, size in self.memory_bytes.items():
            price = self.prices.get(method)
            cost = f"{price.seconds:.3g} s ({price.source})" if price else "does not fit"
            rows.append(f"  {method:20} {cost:26} {size:.3g} bytes")
        return "\n".join(rows)


# A word of a GPU's own name -> its device of the catalogue.
GPUS: Mapping[str, str] = {"H200": "h200-sxm", "H100": "h100-sxm", "A100": "a100-sxm-80gb", "A6000": "a6000"}


# Builds of the same chip with another memory or clock, or a slice of a chip.
OTHER_BUILDS = frozenset({"PCIE", "NVL", "40GB", "MIG"})


def gpu_device(gpu: str) -> str:
    """Returns the device of the catalogue for a GPU's name. Raises ValueError for any other GPU, because
    prices of another device would silently choose a method."""
    # Whole words: an "RTX 6000 Ada" is no A6000, an "A1000" no A100.
    words = gpu.upper().replace("-", " ").split()
    for word, name in GPUS.items():
        if word in words and not OTHER_BUILDS.intersection(words):
            return name
    raise ValueError(f"no device of the catalogue is a {gpu}: give device_name; {_allowed_devices()}")


def default_device(device: torch.device) -> str:
    """Returns the device of the catalogue for a tensor's device, unless the user names one. Raises ValueError
    if there is none."""
    if device.type == "cuda":
        return gpu_device(torch.cuda.get_device_name(device))
    if device.type == "cpu":
        return "cpu"
    raise ValueError(f"no device of the catalogue is a {device}: give device_name; {_allowed_devices()}")


def _allowed_devices() -> str:
    return f"allowed: {', '.join(device_names())}"


@lru_cache(maxsize=16)
def _device(name: str) -> tuple[DeviceSpec, Pricer]:
    """Returns a device of the catalogue and its prices, from its default profile if that exists."""
    spec = load_device(name)
    known = spec.default_profile is not None and spec.default_profile in profile_names(name)
    profile = load_profile(name, spec.default_profile) if known and spec.default_profile else None
    return spec, pricer(spec, profile=profile)


def op_of(method: str, q: Tensor, v: Tensor, *, decay: bool) -> Op:
    """Returns the op of a call with these tensors as it runs here: see the head of this file."""
    return _op(method, _shape(q, v, decay=decay))


class _Shape(NamedTuple):
    """The sizes on which prices depend; `triton`: the methods whose Triton kernels take the tensors."""

    batch: int
    heads: int
    length: int
    rank: int
    dim: int
    dtype: str
    decay: bool
    triton: frozenset[str]


def _shape(q: Tensor, v: Tensor, *, decay: bool) -> _Shape:
    batch, heads, length, rank = q.shape
    taken = frozenset(method for method in TRITON if is_taken(method, q, v))
    return _Shape(batch, heads, length, rank, v.shape[-1], NAMES[q.dtype], decay, taken)


@lru_cache(maxsize=REMEMBERED)
def _op(method: str, shape: _Shape) -> Op:
    in_torch = f"{method}_torch"
    return linear_attention(
        in_torch if in_torch in TORCH_METHODS and method not in shape.triton else method,
        batch=shape.batch,
        heads=shape.heads,
        length=shape.length,
        rank=shape.rank,
        dim=shape.dim,
        dtype=shape.dtype,
        decay=shape.decay,
    )


def chosen_method(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor | None = None,
    *,
    device_name: str | None = None,
    price: Pricer | None = None,
) -> Choice:
    """Returns the choice of "auto" for these tensors; `price`, if given, replaces the device's own prices.

    Raises ValueError for bad tensors and if no method fits, InputError for an unknown device.
    """
    _check_tensors(q, k, v, decay, None)
    name = device_name or default_device(q.device)
    shape = _shape(q, v, decay=decay is not None)
    return _chosen(name, shape) if price is None else _cheapest(name, shape, price)


@lru_cache(maxsize=REMEMBERED)
def _chosen(name: str, shape: _Shape) -> Choice:
    """Chooses by the device's own prices; once a shape, because it takes longer than a short call."""
    return _cheapest(name, shape, _device(name)[1])


def _cheapest(name: str, shape: _Shape, price: Pricer) -> Choice:
    spec = _device(name)[0]
    ops = {method: _op(method, shape) for method in METHODS}
    sizes = {method: memory_bytes(op) for method, op in ops.items()}
    fitting = [method for method in METHODS if sizes[method] <= spec.memory_bytes]
    if not fitting:
        least = min(sizes.values())
        raise ValueError(f"no method fits: {least:.3g} bytes at least, {name} has {spec.memory_bytes:.3g}")
    prices = {method: price(ops[method]) for method in fitting}
    cheapest = min(fitting, key=lambda method: prices[method].seconds)
    return Choice(cheapest, name, MappingProxyType(prices), MappingProxyType(sizes))


def causal_linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor | None = None,
    method: str = "auto",
    state: Tensor | None = None,
    device_name: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns output [batch, heads, length, dim] and the state after it [batch, heads, rank, dim].

    q and k are [batch, heads, length, rank], v is [batch, heads, length, dim], decay is [heads] in (0, 1] or
    None for 1, state is the state after an earlier part of the sequence. The returned state is float32 if q
    is in half precision. Raises ValueError for anything else, InputError for an unknown device.
    """
    _check_tensors(q, k, v, decay, state)
    if not isinstance(method, str) or method not in ("auto", *METHODS):
        raise ValueError(f"method is {method!r}; allowed: auto, {', '.join(METHODS)}")
    if method == "auto":
        method = chosen_method(q, k, v, decay, device_name=device_name).method
    return _run(method, q, k, v, decay, state)


def causal_linear_attention_step(
    q: Tensor, k: Tensor, v: Tensor, state: Tensor, decay: Tensor | None = None
) -> Tensor:
    """Returns output [batch, heads, 1, dim] of one more token; updates `state` in place.

    q and k are [batch, heads, 1, rank], v is [batch, heads, 1, dim]. Raises ValueError for anything else.
    """
    _check_tensors(q, k, v, decay, state)
    batch, heads, length, rank = q.shape
    if length != 1:
        raise ValueError(f"q has {length} tokens; a step takes 1")
    op = linear_attention_step(
        batch=batch,
        heads=heads,
        rank=rank,
        dim=v.shape[-1],
        dtype=NAMES[q.dtype],
        decay=decay is not None,
    )
    output: Tensor = LINEAR_ATTENTION[op.kind].run(op, q, k, v, state, decay)[0]
    return output


def _run(
    method: str, q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None, state: Tensor | None
) -> tuple[Tensor, Tensor]:
    op = op_of(method, q, v, decay=decay is not None)
    output, last = LINEAR_ATTENTION[op.kind].run(op, q, k, v, decay, state)
    return output, last


# -- what may be given ---------------------------------------------------------------------------


def _check_tensors(q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None, state: Tensor | None) -> None:
    """Raises ValueError naming the argument and the allowed values."""
    _check_kinds(q=q, k=k, v=v, decay=decay, state=state)
    if q.dim() != 4 or 0 in q.shape:
        raise ValueError(f"q is {list(q.shape)}; allowed: [batch, heads, length, rank], all at least 1")
    batch, heads, length, rank = q.shape
    if q.dtype not in NAMES:
        raise ValueError(f"q is {q.dtype}; allowed: {', '.join(map(str, NAMES))}")
    if v.dim() != 4 or v.shape[-1] == 0:
        raise ValueError(f"v is {list(v.shape)}; allowed: [batch, heads, length, dim], all at least 1")
    dim = v.shape[-1]
    _check_shape("k", k, (batch, heads, length, rank))
    _check_shape("v", v, (batch, heads, length, dim))
    for name, tensor in (("k", k), ("v", v)):
        if tensor.dtype != q.dtype:
            raise ValueError(f"{name} is {tensor.dtype}; allowed: {q.dtype}, as q")
    if state is not None:
        _check_shape("state", state, (batch, heads, rank, dim))
        if state.dtype not in (q.dtype, accumulated_in(q.dtype)):
            allowed = " or ".join(dict.fromkeys(map(str, (q.dtype, accumulated_in(q.dtype)))))
            raise ValueError(f"state is {state.dtype}; allowed: {allowed}")
    if decay is not None:
        _check_shape("decay", decay, (heads,))
        if not bool(((decay > 0.0) & (decay <= 1.0)).all()):
            raise ValueError(f"decay is {decay.tolist()}; allowed: 0 < decay <= 1 for every head")
    for name, other in (("k", k), ("v", v), ("decay", decay), ("state", state)):
        if other is not None and other.device != q.device:
            raise ValueError(f"{name} is on {other.device}; allowed: {q.device}, as q")


def _check_kinds(**tensors: object) -> None:
    for name, given in tensors.items():
        optional = " or None" if name in ("decay", "state") else ""
        if not isinstance(given, Tensor) and not (optional and given is None):
            raise ValueError(f"{name} is a {type(given).__name__}; allowed: a tensor{optional}")


def _check_counts(**counts: object) -> None:
    for name, count in counts.items():
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise ValueError(f"{name} is {count!r}; whole numbers from 1 on are allowed")


def _check_shape(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name} is {list(tensor.shape)}; allowed: {list(shape)}")


# -- a method of one's own -----------------------------------------------------------------------

Method = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor | tuple[Tensor, Tensor]]
METHOD_GIVES = "allowed: the output, or the output and the final state"


@dataclass(frozen=True, slots=True)
class Benchmark:
    """Wall-clock seconds of a method over `n` calls, its error against float64 relative to the largest
    output, and the medians of the built-in methods that fit, on the same tensors."""

    median_s: float
    p10_s: float
    p90_s: float
    n: int
    error: float
    built_in_median_s: Mapping[str, float]


def benchmark_method(
    fn: Method,
    *,
    batch: int,
    heads: int,
    length: int,
    rank: int,
    dim: int,
    dtype: torch.dtype = torch.float32,
    decay: bool = True,
    device: str | torch.device = "cpu",
    repeats: int = 15,
    device_name: str | None = None,
) -> Benchmark:
    """Checks fn(q, k, v, decay) against the explicit sum in float64, then times it and the built-in methods.

    `fn` returns the output, or the output and the final state, and leaves its inputs unchanged; decay is
    [heads] or None. Raises ValueError, and times nothing, if `fn` does otherwise or its output is wrong, and
    for sizes and repeats below 1. `device_name`: the device of the catalogue into whose memory the built-in
    methods have to fit, needed if `device` alone does not determine it.
    """
    _check_counts(batch=batch, heads=heads, length=length, rank=rank, dim=dim, repeats=repeats)
    if not callable(fn):
        raise ValueError(f"fn is {fn!r}; allowed: a function of q, k, v and decay")
    if not isinstance(decay, bool):
        raise ValueError(f"decay is {decay!r}; allowed: True or False")
    if dtype not in NAMES:
        raise ValueError(f"dtype is {dtype}; allowed: {', '.join(map(str, NAMES))}")
    place = _place(device)
    op = linear_attention(
        "vanilla",
        batch=batch,
        heads=heads,
        length=length,
        rank=rank,
        dim=dim,
        dtype=NAMES[dtype],
        decay=decay,
    )
    q, k, v, *rest = inputs(op, torch.Generator(place).manual_seed(1), place)
    gamma = rest[0] if rest else None
    error = _error(fn, q, k, v, gamma)
    fitting = chosen_method(q, k, v, gamma, device_name=device_name).prices
    own = _timed(partial(fn, q, k, v, gamma), repeats, place)
    tenths = quantiles(own, n=10, method="inclusive") if repeats > 1 else own * 9
    others = {
        method: median(_timed(partial(_run, method, q, k, v, gamma, None), repeats, place))
        for method in fitting
    }
    return Benchmark(median(own), tenths[0], tenths[-1], len(own), error, others)


def _place(device: str | torch.device) -> torch.device:
    """Returns the device of torch. Raises ValueError if there is none of that name here."""
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, TypeError, AssertionError) as error:
        first = str(error).splitlines()[0]
        raise ValueError(f"device is {device!r}; allowed: a device of torch that is here ({first})") from None


def _error(fn: Method, q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None) -> float:
    """Returns the largest error over the largest output. Raises ValueError if it is above TOLERANCES."""
    expected = naive(q, k, v, decay)
    own = [q.clone(), k.clone(), v.clone(), None if decay is None else decay.clone()]
    given = fn(*own)  # type: ignore[arg-type]
    pairs = zip(("output", "final state"), _tensors(given), expected, strict=False)
    _check_unchanged((q, k, v, decay), own)
    worst = 0.0
    for name, value, truth in pairs:
        if value.shape != truth.shape:
            raise ValueError(f"fn gives {name} {list(value.shape)}; allowed: {list(truth.shape)}")
        error = float(((value.double() - truth).abs().max() / truth.abs().max()).item())
        if not error <= TOLERANCES[q.dtype]:
            raise ValueError(f"fn's {name} is off by {error:.3g}; allowed: {TOLERANCES[q.dtype]:g} relative")
        worst = max(worst, error)
    return worst


def _tensors(given: object) -> tuple[Tensor, ...]:
    """Returns a method's result as (output,) or (output, final state). Raises ValueError for others."""
    found = (given,) if isinstance(given, Tensor) else given
    if not isinstance(found, tuple | list):
        raise ValueError(f"fn gives a {type(given).__name__}; {METHOD_GIVES}")
    if not isinstance(given, Tensor) and len(found) != 2:
        raise ValueError(f"fn gives a {type(given).__name__} of {len(found)}; {METHOD_GIVES}")
    tensors = tuple(part for part in found if isinstance(part, Tensor))
    if len(tensors) != len(found):
        kinds = ", ".join(type(part).__name__ for part in found)
        raise ValueError(f"fn gives a {type(given).__name__} of {kinds}; {METHOD_GIVES}")
    return tensors


def _check_unchanged(before: Sequence[Tensor | None], after: Sequence[Tensor | None]) -> None:
    """Raises ValueError if a method has written to its inputs: timed calls would get other inputs."""
    for name, one, other in zip(("q", "k", "v", "decay"), before, after, strict=True):
        if one is not None and other is not None and not torch.equal(one, other):
            raise ValueError(f"fn writes into {name}; allowed: inputs that are left as they are")


def _timed(call: Callable[[], object], repeats: int, device: torch.device) -> list[float]:
    """Returns the seconds of each of `repeats` calls, after one uncounted call."""
    seconds = []
    for _ in range(repeats + 1):
        _synchronize(device)
        start_s = perf_counter()
        call()
        _synchronize(device)
        seconds.append(perf_counter() - start_s)
    return seconds[1:]


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
