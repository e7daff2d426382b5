"""From runs of one's own service to an engine's file: `simcore calibrate --from`.

The file is a preset of one's own (`simcore/studies/serving/engines/presets.py`): it stands on the engine of
the scenario and adds the host time that was fitted, with how good it was for each run that was held back.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from simcore.assembly import assemble
from simcore.input.drafts import write_text
from simcore.input.files import InputError
from simcore.scenario import Scenario, parse_scenario, resolved
from simcore.studies.one_device import DeviceStudy
from simcore.studies.serving.engines.presets import own_of, preset_of
from simcore.studies.serving.host_time import KERNELS, HostTime
from simcore.studies.serving.runner import Bench
from simcore.studies.serving.scenario import ServingScenario
from simcore.studies.serving.strategies import ContinuousBatching
from simcore.studies.serving.study import cases, refusal
from simcore.validate.calibration.service import HeldBack, Times, each_held_back, fitted, told_apart
from simcore.validate.calibration.service_runs import ServiceRun, read_run

Doing = Callable[[str, int, int], None]
# A TPOT that the fit misses by more says that it explains nothing.
FAR = 0.05
# The field that is fitted; the first line of what is written.
HOST = "host"
HEAD = "# Written by `simcore calibrate --from`. A strategy takes it by `engine: FILE`; times in s.\n"


@dataclass(frozen=True, slots=True)
class Calibrated:
    """A service's host time by all its runs, each run held back, and what these runs do not tell."""

    host: HostTime
    held_back: Sequence[HeldBack]
    notes: Sequence[str]


def calibrate_service(
    files: Sequence[Path], scenario: Scenario, where: str, out: Path, doing: Doing
) -> Calibrated:
    """Fits the host time of a scenario's service to result files and writes the file of its engine. `where`:
    the scenario in messages. Raises InputError."""
    own, document = _service(scenario, where)
    runs = {str(path): read_run(path) for path in files}
    seen: dict[bytes, Path] = {}
    for path in files:
        if (other := seen.setdefault(path.read_bytes(), path)) is not path:
            raise InputError(f"--from: {path}: is the same run as {other}")
    predict = _Predict(document, where)
    held_back: list[HeldBack] = []
    for one in each_held_back(runs, predict):
        held_back.append(one)
        doing("fit", len(held_back), len(runs) + 1)
    host = _rounded(fitted([*runs.values()], predict).alone())
    notes = list(_notes(runs, predict, host))
    found = Calibrated(host, held_back, notes)
    write_text(out, _text(found, own, scenario.name, list(runs)))
    return found


def check_out(out: Path, inputs: Sequence[Path]) -> None:
    """Raises InputError where an engine's file cannot be written, or would replace what this has not."""
    if out.suffix != ".yaml":
        raise InputError(f"--out {out}: an engine's file ends in .yaml")
    if out.is_dir() or not out.absolute().parent.is_dir():
        raise InputError(f"--out {out}: {'is a folder' if out.is_dir() else 'its folder is not there'}")
    if out.exists() and (
        any(out.samefile(path) for path in inputs if path.exists())
        or not out.read_bytes().startswith(HEAD.encode())
    ):
        raise InputError(f"--out {out}: is there, and calibrate --from has not written it, or reads it now")


def _rounded(host: HostTime) -> HostTime:
    """Returns a host time in nanoseconds, which a simulation takes steps in."""
    return host.model_copy(update={name: round(seconds, 9) for name, seconds in host.numbers.items()})


def _service(scenario: Scenario, where: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns what the service's engine has besides its host time, as a file of one's own, and the scenario
    with all its fields. Raises InputError if it is not one case of one service with an engine."""
    if not isinstance(scenario, ServingScenario):
        raise InputError(f"{where}: study: is {scenario.study}; serving is needed")
    (one, *others) = scenario.strategies
    if others or not isinstance(one, ContinuousBatching) or one.engine is None:
        raise InputError(f"{where}: strategies: one of kind continuous_batching with an engine is needed")
    if scenario.fleets or len(scenario.devices_in_use) != 1:
        raise InputError(f"{where}: device: one device is needed")
    own = own_of(one.engine)
    fields, sources = (dict(own.fields), dict(own.sources)) if own else ({}, {})
    document = resolved(assemble(scenario, where).scenario)
    # The host time is fitted with these kernels, whichever the base has.
    (strategy,) = document["strategies"]
    fields[HOST] = {name: strategy[HOST][name] for name in KERNELS}
    return {"base": preset_of(one.engine), "fields": fields, "sources": sources}, document


class _Predict:
    """Simulates runs, each with every host time once. `document`: the service's scenario, all fields
    written."""

    def __init__(self, document: dict[str, Any], where: str) -> None:
        self._document, self._where = document, where
        self._known: dict[tuple[Path, HostTime], Times] = {}
        self._bench: Bench | None = None

    def __call__(self, tasks: Sequence[tuple[ServiceRun, HostTime]]) -> list[Times]:
        """Returns the mean latencies of the requests of each run."""
        return [self.one(run, host) for run, host in tasks]

    def one(self, run: ServiceRun, host: HostTime) -> Times:
        """Returns the mean latencies of a run's requests."""
        key = run.path, host
        if key not in self._known:
            self._known[key] = self._simulated(run, host)
        return self._known[key]

    def _simulated(self, run: ServiceRun, host: HostTime) -> Times:
        (strategy,) = self._document["strategies"]
        document = {
            **self._document,
            "workload": dict(run.workload),
            "strategies": [{**strategy, HOST: {**strategy[HOST], **host.numbers}}],
        }
        scenario = parse_scenario(document, str(run.path))
        assert isinstance(scenario, ServingScenario)
        bench = self._bench_of(scenario)
        case, *others = cases(bench)
        if others:
            raise InputError(
                f"{self._where}: makes {1 + len(others)} cases; one is needed: no lists, devices as ranks"
            )
        if (reason := refusal(bench, case)) is not None:
            raise InputError(f"{run.path}: {reason}")
        served = bench.run(case, 0).served
        done = served.finished
        several = done & (served.output_tokens > 1)
        decode_s = (served.finish_s - served.first_token_s)[several] / (served.output_tokens[several] - 1)
        return Times(float((served.first_token_s - served.arrival_s)[done].mean()), float(decode_s.mean()))

    def _bench_of(self, scenario: ServingScenario) -> Bench:
        if self._bench is None:
            study = assemble(scenario, self._where).study
            assert isinstance(study, DeviceStudy)
            self._bench = replace(study.bench, hardware=replace(study.bench.hardware, jobs=1))
        return self._bench.of(scenario)


def _notes(runs: dict[str, ServiceRun], predict: _Predict, host: HostTime) -> Iterator[str]:
    """Yields what these runs do not tell, where prices alone are more than was measured, and where the fit is
    far from what it was fitted to."""
    apart = told_apart([*runs.values()])
    if "sequence_s" not in apart:
        yield "all runs have as many sequences in a step: what one adds is in step_s; vary the load to tell"
    if "prompt_token_s" not in apart:
        yield "all runs have prompts as long: what a token adds is in request_s; vary the length to tell"
    if len(runs) == 1:
        yield "one run: nothing is held back, so how good this is for other loads is not known"
    for name, run in runs.items():
        if run.capped:
            how = "so many clients" if run.workload["arrivals"]["kind"] == "closed_loop" else "its rate alone"
            yield f"{name}: has request_rate and max_concurrency; it is simulated as {how}"
        if not run.listed:
            yield f"{name}: has no input_lens (--save-detailed): all its requests are taken to be as long"
        fit, alone = predict.one(run, host), predict.one(run, HostTime())
        off = math.exp(abs(math.log(fit.tpot_s / run.times.tpot_s))) - 1.0
        if off > FAR:
            yield (
                f"{name}: fitted to it, TPOT is still {100.0 * off:.0f} % off: no host as fast as usual ones"
                " explains these runs together, so this says little of other loads"
            )
        if alone.tpot_s > run.times.tpot_s:
            pct = 100.0 * (alone.tpot_s / run.times.tpot_s - 1.0)
            yield f"{name}: without host time TPOT is predicted {pct:.1f} % too long already: by prices"


def _text(found: Calibrated, own: Mapping[str, Any], name: str, files: Sequence[str]) -> str:
    """Returns the content of an engine's file: what it has besides, `own`, and the host time."""
    said = "; ".join(
        f"{Path(one.name).name} held back: TPOT {one.tpot_pct:+.1f} %, TTFT {one.ttft_pct:+.1f} %"
        for one in found.held_back
    )
    names = ", ".join(Path(each).name for each in files)
    document = {
        "name": name,
        "base": own["base"],
        "description": f"{own['base']} with the host time of a service, fitted to {len(files)} of its runs",
        "fields": {**own["fields"], HOST: {**own["fields"][HOST], **found.host.numbers}},
        "sources": {
            **own["sources"],
            HOST: f"fitted to {names} by simcore calibrate --from. {said or 'Nothing held back.'}",
        },
    }
    return HEAD + yaml.safe_dump(document, sort_keys=False, width=100)
