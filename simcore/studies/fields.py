"""Fields that the scenarios of several studies have: formats, ranks, overheads, the devices, the model."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Annotated, Any

from pydantic import AfterValidator, Field, field_serializer, model_validator

from simcore.input.fields import Device, DeviceChoice, FieldError, Many, OneDevice, Strict, distinct
from simcore.input.files import Name, Seconds, nearest, shown
from simcore.machine.machine import Overheads
from simcore.models.decoder import MATRICES
from simcore.ops.op import DTYPE_BYTES, MULTIPLIED_AS

DTYPE_KEYS = (*MATRICES, "embedding", "kv")


def _weight_dtype(name: str) -> str:
    if name not in DTYPE_BYTES:
        raise ValueError(f"unknown dtype {shown(name)}{nearest(name, DTYPE_BYTES)}")
    return name


def _dtype(name: str) -> str:
    plain = [dtype for dtype in DTYPE_BYTES if dtype not in MULTIPLIED_AS]
    if name not in plain:
        raise ValueError(f"unknown dtype {shown(name)}{nearest(name, plain)}")
    return name


def _matrix(name: str) -> str:
    if name not in DTYPE_KEYS:
        raise ValueError(f"no such matrix{nearest(name, DTYPE_KEYS)}")
    return name


Dtype = Annotated[str, AfterValidator(_dtype)]
# Number formats of matrices, with those whose stored format differs from the one they are multiplied in.
WeightDtype = Annotated[str, AfterValidator(_weight_dtype)]
Matrix = Annotated[str, AfterValidator(_matrix)]
MOST_RANKS = 1024
Ranks = Annotated[int, Field(ge=1, le=MOST_RANKS)]
SeveralRanks = Annotated[
    Many[Ranks], Field(description="devices of a group or server, which hold a slice of the model each")
]

# -- fields that several studies have ------------------------------------------------------------------

OnCpu = Annotated[
    dict[str, Any],
    Field(description="fields that take other values where the scenario runs on the CPU, by dotted path"),
]
ToCompare = Annotated[
    list[str],
    AfterValidator(distinct),
    Field(description="published figures to compare with: names of those shipped, or paths to CSV files"),
]
Seed = Annotated[
    int, Field(ge=0, lt=2**63, description="seed of random numbers: the same one gives the same figures")
]
Unused = Annotated[int, Field(ge=0, lt=2**63, description="nothing is drawn: for the record")]
# Costs of a launch besides `launch_s`.
WITH_LAUNCH = "launch_kernel_s", "return_s", "start_s", "batch_s", "sequence_s", "prompt_s", "each_prompt_s"
_COSTS: Mapping[str, Any] = {cost.name: Field(None, **cost.metadata) for cost in fields(Overheads)}


class HostOverheads(Strict):
    """Costs of the machine's verbs in seconds, in the place of the device's own."""

    launch_s: Seconds | None = _COSTS["launch_s"]
    launch_kernel_s: Seconds | None = _COSTS["launch_kernel_s"]
    return_s: Seconds | None = _COSTS["return_s"]
    start_s: Seconds | None = _COSTS["start_s"]
    within_s: Seconds | None = _COSTS["within_s"]
    size_s: Seconds | None = _COSTS["size_s"]
    batch_s: Seconds | None = _COSTS["batch_s"]
    sequence_s: Seconds | None = _COSTS["sequence_s"]
    prompt_s: Seconds | None = _COSTS["prompt_s"]
    each_prompt_s: Seconds | None = _COSTS["each_prompt_s"]
    wait_s: Seconds | None = _COSTS["wait_s"]
    message_s: Seconds | None = _COSTS["message_s"]
    gate_s: Seconds | None = _COSTS["gate_s"]
    flags_s: Seconds | None = _COSTS["flags_s"]
    in_graph_s: Seconds | None = _COSTS["in_graph_s"]
    in_step_s: Seconds | None = _COSTS["in_step_s"]

    def given(self) -> dict[str, float]:
        """Returns the given costs, in seconds by name. If `launch_s` is given, the other costs of a launch
        are 0 unless given."""
        said: dict[str, float] = self.model_dump(exclude_none=True)
        return {**dict.fromkeys(WITH_LAUNCH, 0.0), **said} if "launch_s" in said else said


Costs = Annotated[
    HostOverheads,
    Field(
        description="host and device costs in place of the device's own, s; with launch_s, all of a launch:"
        f" {', '.join(WITH_LAUNCH)} are 0 then unless given"
    ),
]


class OnDevices(Strict):
    """What every study says: its name, and the devices that it is run for, one after the other."""

    name: Name = Field(description="what the study is called; its results go to runs/NAME/")
    study: str
    device: Many[Device] = Field(
        description="device that it runs on: a name (`simcore devices`), a path to a YAML file, or one with"
        " changed figures; several are ranked"
    )

    @field_serializer("device")
    def _one_or_several(self, device: list[DeviceChoice]) -> Any:
        each = [choice.model_dump() for choice in device]
        return each[0] if len(each) == 1 else each

    @property
    def devices_in_use(self) -> list[OneDevice]:
        """The devices that it runs on, one after the other."""
        return [one for choice in self.device for one in choice.each()]


class Common(OnDevices):
    """What studies of a whole model say: the model, what to compare with, how often to draw."""

    model: str = Field(description="a name (`simcore models`), or a path to a Hugging Face config.json")
    profile: str | None = Field(None, description="a profile of the device, 'none', or the device's default")
    link: Annotated[str, Field(min_length=1)] | None = Field(
        None, description="a link of the device, or its default"
    )
    dtype: WeightDtype | None = Field(
        None,
        description="number format of weights and KV cache; by default the profile's, the model's, or bf16",
    )
    dtypes: dict[Matrix, WeightDtype] = Field(
        {}, description=f"number format by matrix: {', '.join(DTYPE_KEYS)}"
    )
    beyond_model_context: bool = Field(
        False, description="whether contexts longer than the model's max_position_embeddings are run"
    )
    overheads: Costs = HostOverheads()
    published: ToCompare = []
    on_cpu: OnCpu = {}
    replicas: int = Field(1, ge=1, le=1000, description="runs with other random numbers, for intervals")
    seed: Seed = 0

    @model_validator(mode="after")
    def _cache_has_a_format_of_its_own(self) -> "Common":
        if (kv := self.dtypes.get("kv")) in MULTIPLIED_AS:
            raise FieldError(
                "dtypes.kv", f"is {kv!r}, a format of weights; bf16, fp8 or int8, say, is needed"
            )
        return self
