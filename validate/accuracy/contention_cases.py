"""Concurrent graphs on one device: their programs, written once for both machines, and the time of a case.

    streams   n instances decode the same number of tokens, each on its stream; per token
    beside    one long-convolution tile after the other on "side", token steps on "main"; each by itself

All work of a stream is one captured graph, and one launch (HOLD) releases all streams, so the host has no
effect. The same program measures each graph alone; that time is its price on the simulated machine, so the
comparison concerns contention only.

    seconds = (last end - first start on the streams) / graphs on one of them
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from statistics import median
from typing import Literal, cast

from simcore.machine.machine import Machine, Overheads, Program, Ticket
from simcore.machine.trace import Trace
from simcore.models.decoder import Decoder, Dtypes
from simcore.models.decoder_config import DecoderConfig
from simcore.models.long_convolution import LongConvolution
from simcore.ops.convolution import Implementation
from simcore.ops.op import Graph, Op, Price, Pricer, Roofline
from simcore.sim.contention import Rates
from simcore.sim.runs import Setup, Start, simulated
from simcore.validate.calibration.cuda_instances import Instances

Kind = Literal["shared weights", "own weights", "beside"]
SHARED: Kind = "shared weights"
OWN: Kind = "own weights"
BESIDE: Kind = "beside"
KINDS: tuple[Kind, ...] = (SHARED, OWN, BESIDE)
# Replays of the holding graph: more than a machine queues ahead, so that the last ones still run while the
# streams are queued.
HOLD, HELD_ON = 4, "hold"
# Timed graphs of a stream, alone and beside others.
STEPS, MOST_STEPS = 12, 64
MAIN, SIDE = "main", "side"
CONTEXT, POSITION = "context", "position"


@dataclass(frozen=True, slots=True)
class Case:
    """Concurrent work. Instances: each of `count` decodes `steps` tokens at `context`. Beside: a tile of
    `side` by `method` in a batch of `batch` sequences, `tiles` times, beside `steps` token steps."""

    kind: Kind
    batch: int
    count: int = 1
    context: int = 0
    side: int = 0
    method: str = ""
    steps: int = STEPS
    tiles: int = 0

    @property
    def text(self) -> str:
        """Returns the case as text for tables."""
        if self.kind == BESIDE:
            return (
                f"{self.tiles} x {self.method} of {self.side} beside {self.steps} steps, batch {self.batch}"
            )
        return f"{self.count} streams, {self.kind}, batch {self.batch}, context {self.context}"


@dataclass(frozen=True, slots=True)
class Models:
    """The models of the cases: layers of a decoder, and a long convolution as long as the tile needs."""

    config: DecoderConfig
    dtypes: Dtypes
    convolution: LongConvolution

    def instances(self, case: Case) -> Instances:
        """Returns the decoders of a case."""
        decoder = Decoder(self.config, batch=case.batch, dtypes=self.dtypes, outside=False)
        return Instances(decoder, case.count, case.kind == OWN)

    def tiled(self, case: Case) -> LongConvolution:
        """Returns the long convolution of a case, with room for the tile, its outputs, and later steps."""
        method = cast(Implementation, case.method)
        tiles = ((case.side, method),)
        return replace(self.convolution, batch=case.batch, tokens=4 * case.side, tiles=tiles)


@dataclass(frozen=True, slots=True)
class Job:
    """All work of a stream: a graph that repeats the timed graph."""

    stream: str
    graph: Graph
    sizes: tuple[tuple[str, int], ...]


def jobs(case: Case, models: Models) -> list[Job]:
    """Returns the concurrent jobs of a case."""
    if case.kind != BESIDE:
        made, sizes = models.instances(case), ((CONTEXT, case.context),)
        return [Job(made.stream(i), _over(made.graph(i), case.steps), sizes) for i in range(case.count)]
    model, side = models.tiled(case), case.side
    found = []
    if case.steps:
        found.append(Job(MAIN, _over(model.step(), case.steps), ((POSITION, 2 * side),)))
    if case.tiles:
        found.append(Job(SIDE, _over(model.tile(side, side), case.tiles), ((POSITION, side - 1),)))
    return found


@cache
def _over(graph: Graph, times: int) -> Graph:
    """Repeats a graph; equal arguments return the same object, which a machine recognizes at once."""
    return replace(graph, name=f"{graph.name} x {times}", ops=graph.ops * times)


def program(m: Machine, held: Job, all_: Sequence[Job]) -> Program:
    """Launches all jobs; they start together when the holding graph ends."""
    hold = _launch(m, held, HELD_ON, HOLD)
    tickets = [_launch(m, job, job.stream, 1, hold) for job in all_]
    yield m.wait(*tickets)


def _launch(m: Machine, job: Job, stream: str, times: int, *after: Ticket) -> Ticket:
    """Launches replays at one unchanged position, so that their cost stays the same."""
    sizes = dict(job.sizes)
    still = dict.fromkeys(sizes, 0)
    return m.launch(job.graph, stream=stream, after=after, sizes=sizes, advance=still, repeat=times)


def seconds_of(trace: Trace, case: Case, stream: str = "") -> float:
    """Returns the seconds of a graph on a stream, or by default of all instances' graphs; see the head."""
    spans = [s for s in trace.spans if s.stream != HELD_ON and stream in ("", s.stream)]
    times = case.tiles if stream == SIDE else case.steps
    return (max(s.end_s for s in spans) - min(s.start_s for s in spans)) / times


def streams_of(case: Case) -> tuple[str, ...]:
    """Returns the streams timed separately: all instances together, or each of the two streams."""
    return (MAIN, SIDE) if case.kind == BESIDE else ("",)


@dataclass(frozen=True, slots=True)
class Device:
    """The machine that runs cases, and the device's data for the simulated machine."""

    price: Pricer
    roofline: Roofline
    overheads: Overheads
    start: Start = simulated

    def run(self, case: Case, models: Models, rates: Rates | None = None) -> Trace:
        """Runs a case once."""
        all_ = jobs(case, models)
        beside = case.kind == BESIDE
        setup = Setup(
            model=models.tiled(case) if beside else models.instances(case),
            price=self.price,
            roofline=self.roofline,
            overheads=self.overheads,
            title=case.text,
            # With other sizes graphs are captured anew, so each set of sizes gets its own warm-up.
            holds={CONTEXT: case.context, "tokens": 1, "steps": case.steps, "tiles": case.tiles},
        )
        if rates is not None:
            setup = replace(setup, rates=rates)
        held = all_[0]
        return self.start(setup).run(partial(program, held=held, all_=all_))


@dataclass(frozen=True, slots=True)
class Row:
    """A measured case: seconds of a graph on `stream` (empty: on all together), alone and beside the others,
    each the median of `n` runs; runs beside others lie between `least_s` and `most_s`."""

    case: Case
    stream: str
    alone_s: float
    together_s: float
    least_s: float
    most_s: float
    n: int


def alone_of(case: Case) -> list[tuple[str, Case]]:
    """Returns the cases to measure alone before a case, by stream."""
    if case.kind != BESIDE:
        return [("", replace(case, count=1, kind=SHARED))]
    return [
        (MAIN, replace(case, steps=STEPS, tiles=0)),
        (SIDE, replace(case, steps=0, tiles=STEPS)),
    ]


def balanced(case: Case, alone_s: Mapping[str, float]) -> Case:
    """Returns the case with tiles and steps that keep both streams busy about equally and long enough."""
    if case.kind != BESIDE:
        return case
    step_s, tile_s = alone_s[MAIN], alone_s[SIDE]
    steps = min(MOST_STEPS, max(STEPS, round(STEPS * tile_s / step_s)))
    return replace(case, steps=steps, tiles=min(MOST_STEPS, max(1, round(steps * step_s / tile_s))))


def measured(
    cases: Sequence[Case],
    models: Models,
    device: Device,
    repeats: int,
    say: Callable[[str], None],
    is_over: Callable[[], bool] = lambda: False,
) -> Iterator[Row]:
    """Yields each case as it is measured, with the time of its graphs alone, which is measured once. Stops
    when it `is_over`."""
    known: dict[tuple[str, Case], float] = {}
    for asked in cases:
        if is_over():
            return
        alone_s = dict[str, float]()
        for stream, alone in alone_of(asked):
            if (stream, alone) not in known:
                runs = [seconds_of(device.run(alone, models), alone, stream) for _ in range(repeats)]
                known[stream, alone] = median(runs)
            alone_s[stream] = known[stream, alone]
        case = balanced(asked, alone_s)
        traces = [device.run(case, models) for _ in range(repeats)]
        for stream in streams_of(case):
            runs = [seconds_of(trace, case, stream) for trace in traces]
            yield Row(case, stream, alone_s[stream], median(runs), min(runs), max(runs), repeats)
        say(case.text)


def predicted(
    case: Case, alone_s: Mapping[str, float], models: Models, device: Device, rates: Rates
) -> Trace:
    """Runs the same program on the simulated machine, with the times of graphs alone as their prices."""
    prices: dict[Op, Price] = {}
    for job in jobs(case, models):
        sizes = dict(job.sizes)
        # A job repeats the same ops.
        bare = {id(op): op.at(sizes).without_place for op in {id(op): op for op in job.graph.ops}.values()}
        seconds = {key: device.price(op).seconds for key, op in bare.items()}
        times = case.tiles if job.stream == SIDE else case.steps
        scale = (
            times
            * alone_s[job.stream if case.kind == BESIDE else ""]
            / sum(seconds[id(op)] for op in job.graph.ops)
        )
        for key, op in bare.items():
            own_s = scale * seconds[key]
            prices[op] = Price(own_s, own_s, own_s, "measured", "its graph alone, shared out by prices")
    simulator = replace(device, price=prices.__getitem__, start=simulated)
    return simulator.run(case, models, rates)
