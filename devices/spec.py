"""Devices: figures of datasheets and of measurements, in SI units, with sources.

    seconds >= flops / flops_per_s[dtype]       dense peak of the datasheet, never the sparse one
    seconds >= bytes / hbm_bytes_per_s          device memory
    seconds >= bytes / link.bytes_per_s         one direction of one device

A catalogue file `catalog/<name>.yaml` holds one device with all its figures. A user's file has the same keys
and may leave most of them out (`simcore.devices.completed`).
"""

from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter
from pydantic.dataclasses import dataclass

from simcore.devices.completed import OPTIONAL_IN_LINK, REQUIRED, completed
from simcore.input.files import (
    STRICT,
    Bytes,
    Count,
    InputError,
    Name,
    PerSecond,
    Seconds,
    Share,
    Spread,
    is_path,
    read_yaml,
    unknown_name,
    validated,
)
from simcore.machine.machine import Overheads
from simcore.ops.op import DTYPE_BYTES, MULTIPLIED_AS

CATALOG = Path(__file__).resolve().parent / "catalog"
# The device whose measured figures replace figures that a user's file leaves out.
REFERENCE = "h200-sxm"

# Watts of one device.
Power = Annotated[float, Field(ge=0.1, le=1e5)]
Topology = Literal["ring", "all_to_all"]
Algorithm = Literal["ring", "one_shot", "tree", "pushed"]
TensorParallelStyle = Literal["all_reduce", "scatter_gather", "fused_gather"]

# Figures that need an entry in `sources`; links and efficiencies have a source of their own.
SOURCED = (
    "memory_bytes",
    "hbm_bytes_per_s",
    "l2_bytes",
    "processors",
    "flops_per_s",
    "overheads",
    "kernel_s",
    "tensor_parallel",
)
# A figure that may be unknown, and needs an entry in `sources` if it is not.
POWER = "board_power_w"


def check_return(overheads: Mapping[str, float]) -> None:
    """Raises InputError if return_s is longer than launch_s, so that the device would have a launch before it
    began, or if launch_s is missing; overheads in seconds, by name."""
    if "return_s" not in overheads:
        return
    if "launch_s" not in overheads:
        raise InputError("overheads.launch_s: is missing; return_s is a part of it")
    launch_s, return_s = overheads["launch_s"], overheads["return_s"]
    if return_s > launch_s:
        raise InputError(f"overheads.return_s: is {return_s:g}; at most launch_s ({launch_s:g}) is allowed")


def _source() -> Any:
    return Field(description="where these figures come from")


@dataclass(frozen=True, config=STRICT)
class Efficiency:
    """The share of a datasheet rate that kernels reach."""

    value: Share = Field(description="share of the datasheet's rate, 0 to 1")
    low: Share = Field(description="low end of what 90 % of the kernels reach")
    high: Share = Field(description="high end of what 90 % of the kernels reach")
    source: str = _source()

    def __post_init__(self) -> None:
        if not self.low <= self.value <= self.high <= 1.0:
            given = f"{self.low}, {self.value}, {self.high}"
            raise InputError(f"low <= value <= high <= 1 does not hold: {given}")


@dataclass(frozen=True, config=STRICT)
class Link:
    """What connects devices of one host; `simcore.devices.collectives` has the formulas."""

    kind: str = Field(description="what it is, in words: nvlink, pcie, ethernet")
    topology: Topology = Field(
        description="whether devices reach all others at once, or neighbours on a ring"
    )
    bytes_per_s: PerSecond = Field(description="rate of one direction of one device, bytes/s")
    latency_s: Seconds = Field(description="start of every collective and put, paid once, s")
    setup_s: Seconds = Field(description="what a library's ring or tree pays once besides, s")
    step_s: Seconds = Field(description="latency of each step of a ring, a tree or a put, s")
    per_peer_s: Seconds = Field(description="what each peer adds to one_shot, s")
    relative_error: Spread = Field(
        description="half of the 90 % interval of a time computed from these, as a share of it"
    )
    max_devices: Count = Field(description="devices that it connects at most")
    algorithms: tuple[Algorithm, ...] = Field(description="what collectives may use; the fastest is taken")
    source: str = _source()
    one_shot_setup_s: Seconds = Field(
        default=0.0, description="what a library's one_shot pays once besides, s"
    )
    push_per_peer_s: Seconds | None = Field(default=None, description="what each peer adds to pushed, s")
    push_efficiency: Share | None = Field(
        default=None, description="share of bytes_per_s that pushed words reach"
    )
    push_normed_s: Seconds | None = Field(
        default=None, description="what a residual and a norm behind a pushed sum add to it, in its launch, s"
    )

    def __post_init__(self) -> None:
        # On a ring only neighbours are one hop apart; the other algorithms' formulas ignore distance.
        allowed = ("ring",) if self.topology == "ring" else ("ring", "one_shot", "tree", "pushed")
        for name in self.algorithms:
            if name not in allowed:
                runs = f"a {self.topology} (allowed: {', '.join(allowed)})"
                raise InputError(f"algorithm {name!r} does not run on {runs}")
        if not self.algorithms:
            raise InputError(f"algorithms is empty; topology {self.topology} takes {', '.join(allowed)}")
        for key in ("push_per_peer_s", "push_efficiency"):
            given = getattr(self, key) is not None
            if self.pushes and not given:
                raise InputError(f"missing key {key!r}, which algorithm 'pushed' needs")
            if given and not self.pushes:
                raise InputError(f"{key} is of algorithm 'pushed', which is not among algorithms")
        if self.push_normed_s is not None and not self.pushes:
            raise InputError("push_normed_s is of algorithm 'pushed', which is not among algorithms")

    @property
    def pushes(self) -> bool:
        """Whether pushed collectives are among the algorithms."""
        return "pushed" in self.algorithms

    def by_libraries(self) -> "Link":
        """Returns the link without pushed collectives, which no library has. Raises InputError if there are
        no others."""
        if not self.pushes:
            return self
        left = tuple(name for name in self.algorithms if name != "pushed")
        if not left:
            raise InputError("algorithms: is pushed alone; serving takes collectives of libraries: give one")
        return replace(self, algorithms=left, push_per_peer_s=None, push_efficiency=None, push_normed_s=None)


@dataclass(frozen=True, config=STRICT)
class DeviceSpec:
    """One device and how several of it are connected. Where a file of one's own leaves out a figure, that of
    an H200 is assumed."""

    name: Name = Field(description="what it is called; names of the catalogue are taken")
    vendor: str = Field(description="who makes it")
    description: str = Field(description="what it is, in words")
    memory_bytes: Bytes = Field(description="device memory, bytes")
    hbm_bytes_per_s: PerSecond = Field(description="rate of the device memory by the datasheet, bytes/s")
    l2_bytes: Bytes = Field(description="cache that all processors share, bytes")
    processors: Count = Field(
        description="what blocks of a kernel run on side by side: streaming multiprocessors, cores"
    )
    flops_per_s: dict[str, PerSecond] = Field(
        description="dense peak by the datasheet, by number format; bf16 is needed, flop/s"
    )
    links: dict[str, Link] = Field(description="what connects several of it, by name; none: a device alone")
    default_link: str | None = Field(description="link that is used where none is named")
    overheads: Overheads = Field(description="what launches, waits and messages cost, s")
    kernel_s: Seconds = Field(description="what a kernel of a captured graph costs besides its work, s")
    hbm_efficiency: Efficiency = Field(description="share of hbm_bytes_per_s that kernels reach")
    flops_efficiency: Efficiency = Field(description="share of flops_per_s that kernels reach")
    tensor_parallel: dict[str, TensorParallelStyle] = Field(
        description="how a decoder layer is split, by number of ranks or for all others (default)"
    )
    default_profile: str | None = Field(
        description="profile of op times that is used where none is named; null: the datasheet"
    )
    sources: dict[str, str] = Field(description="where the other figures come from, by name")
    sibling: Name | None = Field(
        None, description="device of the catalogue whose measured op times are carried over; by default none"
    )
    board_power_w: Power | None = Field(
        None, description="most that one device takes, TDP by the datasheet, W; by default unknown"
    )

    def __post_init__(self) -> None:
        for dtype in self.flops_per_s:
            if dtype not in DTYPE_BYTES:
                raise InputError(f"flops_per_s: {unknown_name('dtype', dtype, DTYPE_BYTES)}")
        if "bf16" not in self.flops_per_s:
            raise InputError("missing key 'flops_per_s.bf16'; other number formats fall back on it")
        if self.default_link is not None and self.default_link not in self.links:
            raise InputError(f"default_link: {unknown_name('link', self.default_link, self.links)}")
        for field, seconds in asdict(self.overheads).items():
            if not 0.0 <= seconds <= 1.0:
                raise InputError(f"overheads.{field}: is {seconds}; 0 to 1 second is allowed")
        check_return(asdict(self.overheads))
        if "default" not in self.tensor_parallel:
            raise InputError("missing key 'tensor_parallel.default'")
        for ranks in self.tensor_parallel:
            if ranks != "default" and not ranks.isdecimal():
                raise InputError(f"tensor_parallel: {ranks!r} is neither a number of ranks nor 'default'")
        for figure in SOURCED if self.board_power_w is None else (*SOURCED, POWER):
            if figure not in self.sources:
                raise InputError(f"missing key 'sources.{figure}'")

    def link(self, name: str | None = None) -> Link:
        """Returns the link of this name, or the default one. Raises InputError if there is none."""
        wanted = name or self.default_link
        if wanted is None:
            known = ", ".join(self.links) or "none"
            raise InputError(f"{self.name}: names no default_link (links: {known})")
        if wanted not in self.links:
            raise InputError(f"{self.name}: {unknown_name('link', wanted, self.links)}")
        return self.links[wanted]

    def tensor_parallel_style(self, ranks: int) -> str:
        """Returns the style by which a decoder layer is split over this many ranks."""
        return self.tensor_parallel.get(str(ranks), self.tensor_parallel["default"])

    def peak_flops_per_s(self, dtype: str) -> float:
        """Returns the dense peak for weights of this dtype, operations per second.

        Weights of at most 2 bytes without a peak on this device are multiplied as bf16. Raises InputError for
        any other dtype without a peak.
        """
        known = self.flops_per_s
        expands = DTYPE_BYTES.get(dtype, float("inf")) <= DTYPE_BYTES["bf16"]
        peak = known.get(MULTIPLIED_AS.get(dtype, dtype), known.get("bf16") if expands else None)
        if peak is None:
            raise InputError(f"{self.name}: flops_per_s: {unknown_name('dtype', dtype, known)}")
        return peak


def device_names() -> list[str]:
    """Returns the names of the catalogue's devices, sorted."""
    return sorted(path.stem for path in CATALOG.glob("*.yaml"))


def load_device(name_or_path: str) -> DeviceSpec:
    """Loads a device of the catalogue; a name with a '/' in it, or that ends in .yaml, is a user's file,
    which may leave figures out; the path of its profile is relative to its folder.

    Raises InputError with one line if the name is unknown or the file is invalid.
    """
    if not is_path(name_or_path, ".yaml"):
        if name_or_path not in device_names():
            raise InputError(unknown_name("device", name_or_path, device_names()))
        path = CATALOG / f"{name_or_path}.yaml"
        return validated(DeviceSpec, read_yaml(path), str(path))
    path = Path(name_or_path)
    document = read_yaml(path)
    if path.absolute().parent != CATALOG:
        document = _with_profile(completed(document, _reference()), path.parent)
    spec = validated(DeviceSpec, document, str(path))
    if spec.sibling is not None and spec.sibling not in device_names():
        raise InputError(f"{path}: sibling: {unknown_name('device', spec.sibling, device_names())}")
    if spec.sibling == spec.name:
        raise InputError(
            f"{path}: sibling: is {spec.name!r} itself; another device of the catalogue is needed"
        )
    if spec.name in device_names() and path.absolute().parent != CATALOG:
        raise InputError(f"{path}: name: {spec.name!r} is taken by the catalogue; another one is needed")
    return spec


@cache
def _reference() -> Mapping[str, Any]:
    document: Mapping[str, Any] = read_yaml(CATALOG / f"{REFERENCE}.yaml")
    return document


def _with_profile(document: Any, folder: Path) -> Any:
    """Returns the document with the path of its profile made absolute; a folder beside the file needs no
    '/'."""
    name = document.get("default_profile") if isinstance(document, dict) else None
    if not isinstance(name, str) or not (is_path(name, ".yaml") or (folder / name).is_dir()):
        return document
    return {**document, "default_profile": f"{(folder / name).absolute()}/"}


def json_schema() -> dict[str, Any]:
    """Returns the JSON schema of a user's device file, for editors."""
    schema = TypeAdapter(DeviceSpec).json_schema()
    whole, link = schema, schema["$defs"]["Link"]
    efficiency = schema["$defs"]["Efficiency"]
    whole["required"] = [key for key in whole["required"] if key in REQUIRED]
    link["required"] = [key for key in link["required"] if key not in OPTIONAL_IN_LINK]
    efficiency["required"] = [key for key in efficiency["required"] if key != "source"]
    return schema
