"""How to run a point: the command of each serving engine that does what was simulated.

    command = the engine's own, with the arguments of each setting of continuous batching
    several servers   the command on each, and a router in front of them

What engines call a setting stands in engines_flags.yaml, with version and source. A setting that an engine
does not have leaves the engine out, with the reason: a command that runs something else would be wrong.
"""

import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, field
from functools import cache
from math import floor
from pathlib import Path
from typing import Any

import yaml
from pydantic.dataclasses import dataclass

from simcore.assembly import model_path
from simcore.input.files import STRICT, read_json, read_yaml, validated
from simcore.models.decoder import LAYER
from simcore.models.number_formats import number_formats
from simcore.planning.points import Point
from simcore.schedules.reservation import Reservation
from simcore.studies.serving.engines.presets import load_engine, preset_of
from simcore.studies.serving.kv_memory import held_bytes
from simcore.studies.serving.strategies import AnswerRoom, ContinuousBatching

FILE = Path(__file__).resolve().parent / "engines_flags.yaml"
# Engines that are shown where a strategy names none, each in its newest version.
SHOWN = ("vllm", "tensorrt-llm", "sglang")
# Shown to whoever has to put a path or a name in its place.
ANY_MODEL = '"$MODEL"'
OPTIONS = "options.yaml"
HEAD = ("lm_head", "embedding")
# Room for whole answers: nobody is preempted.
WHOLE = "whole"
AS_STORED = "checkpoint"
HUGGING_FACE = re.compile(r"(?:Hugging Face )?([A-Za-z0-9][\w.-]*/[\w.-]*\w)(?=$|[,: ])")
# nginx: of several servers the one with fewest open requests, or each in turn (docs/deployment/nginx.md of
# vLLM; nginx, ngx_http_upstream_module, least_conn). Answers are streamed, so that nothing is held back.
NGINX = (
    "(echo 'upstream servers {{ {method}'; printf 'server %s;\\n' {servers}; echo '}} server {{ listen 80;"
    " location / {{ proxy_pass http://servers; proxy_buffering off; }} }}') > /etc/nginx/conf.d/servers.conf"
    " && nginx -s reload"
)
METHODS: Mapping[str, str] = {"least_loaded": "least_conn;", "round_robin": ""}
Arguments = dict[str, str | dict[str, str]]


@dataclass(frozen=True, config=STRICT)
class EngineFlags:
    """How an engine is told its settings; see engines_flags.yaml."""

    title: str
    source: str
    vendors: tuple[str, ...]
    share_of: str
    command: str
    flags: Arguments
    config: Arguments
    refuses: dict[str, str]
    router: dict[str, str]
    router_source: str
    config_flag: str = ""
    differs: dict[str, str] = field(default_factory=dict)

    def arguments(self, setting: str, case: str, value: str) -> tuple[str, str] | None:
        """Returns the arguments of a setting, and its entry of the file of options; None if there is no such
        setting or case."""
        found = [_of_case(table.get(setting), case) for table in (self.flags, self.config)]
        if all(one is None for one in found):
            return None
        flag, entry = (("" if one is None else one).format(value=value) for one in found)
        return flag, entry

    def has(self, setting: str) -> bool:
        """Whether it has a setting."""
        return setting in self.flags or setting in self.config


def _of_case(entry: str | dict[str, str] | None, case: str) -> str | None:
    return entry.get(case) if isinstance(entry, dict) else entry


@dataclass(frozen=True, config=STRICT)
class Command:
    """A command line of an engine, None if it runs no such point, then with the reason. `router`: the command
    in front of several servers, empty where there is none; `notes`: what the command does not say."""

    engine: str
    title: str
    command: str | None
    why_not: str
    router: str
    notes: list[str]


@cache
def engine_flags() -> Mapping[str, EngineFlags]:
    """Returns the engines by the names of their presets. Raises InputError."""
    document = read_yaml(FILE)
    return {name: validated(EngineFlags, each, f"{FILE}: {name}") for name, each in document.items()}


def how_to_run(point: Point) -> dict[str, Any]:
    """Returns the commands of a point as summary.json has them: where they run, what of the point is in none
    of them, and a command of each engine, or why no engine runs it."""
    strategy, servers = point.case.strategy, point.case.servers
    shape = {"servers": servers, "ranks": point.case.axes.ranks, "placed": "", "without": ""}
    if point.bench.fleet:
        why = "no command: servers of a fleet differ; a plan of each group's device by itself has its command"
        return {**shape, "why_not": why, "commands": []}
    ranks = point.case.ranks
    if type(strategy) is not ContinuousBatching:
        way = strategy.kind.replace("_", " ")
        why = f"no command: {', '.join(_titles())} run continuous batching, and this is {way}"
        return {**shape, "why_not": why, "commands": []}
    names = [preset_of(strategy.engine)] if strategy.engine else [load_engine(name).name for name in SHOWN]
    found = [_command(name, point, strategy) for name in names]
    if servers > 1:
        devices = "a device of its own" if ranks == 1 else f"{ranks} devices of its own"
        shape["placed"] = (
            f"on each of {servers:,} servers, with {devices};"
            f" server1 to server{servers} stand for their addresses"
        )
    if point.case.scaling is not None and any(one.command for one in found):
        start = "1 server, which stays on" if servers == 1 else f"all {servers:,} servers, which stay on"
        shape["without"] = f"autoscaling is not in the commands: they start {start}"
    return {**shape, "why_not": "", "commands": [asdict(one) for one in found]}


def _titles() -> list[str]:
    return [engine_flags()[load_engine(name).name].title.rpartition(" ")[0] for name in SHOWN]


def _command(name: str, point: Point, strategy: ContinuousBatching) -> Command:
    engine, vendor = engine_flags()[name], point.bench.hardware.vendor
    if vendor and vendor not in engine.vendors:
        why = f"{engine.title} is for devices of {' and '.join(engine.vendors)}, and {point.device} is none"
        return Command(name, engine.title, None, why, "", [])
    model, notes = model_name(point.scenario.model), list(_notes(strategy))
    settings = {**_schedule(strategy), **_room(engine, point, strategy, notes)}
    settings["weights"], settings["kv"] = _formats(engine, point, notes)
    if settings["weights"][1]:
        notes.append(f"MODEL is {model or point.scenario.model} {settings['weights'][1]}")
        model = None
    elif model is None:
        notes.append(f"MODEL is the path of {point.scenario.model}, or its name on Hugging Face")
    flags, entries, refused = [], [], []
    for setting, (case, value) in settings.items():
        found = engine.arguments(setting, case, value)
        if found is None:
            known = f"{engine.title} has no {setting}{f' {case}' if case else f' {value}'}"
            why = engine.refuses.get(f"{setting}.{case}", engine.refuses.get(setting, known))
            refused.append(why)
            continue
        flags.append(found[0])
        entries.append(found[1])
        if f"{setting}.{case}" in engine.differs:
            notes.append(engine.differs[f"{setting}.{case}"])
    router, why = _router(engine, point)
    notes += [why] if why else []
    if refused:
        return Command(name, engine.title, None, "; ".join(refused), "", [])
    begins = engine.command.format(model=model or ANY_MODEL)
    text = " ".join(part for part in (_written(entries), begins, *flags) if part)
    if any(entries):
        text += f" {engine.config_flag.format(file=OPTIONS)}"
    return Command(name, engine.title, text, "", router, notes)


def _written(entries: list[str]) -> str:
    """Returns the command that writes the file of options; its entries are "path: value"."""
    document: dict[str, Any] = {}
    for entry in entries:
        for path, value in (yaml.safe_load(entry) if entry else {}).items():
            *folders, last = path.split(".")
            place = document
            for folder in folders:
                place = place.setdefault(folder, {})
            place[last] = value
    return f"echo {shlex.quote(json.dumps(document))} > {OPTIONS} &&" if document else ""


# -- settings: name -> (case, value) -----------------------------------------------------------------------

Settings = dict[str, tuple[str, str]]


def _schedule(strategy: ContinuousBatching) -> Settings:
    budget = strategy.token_budget[0]
    settings: Settings = {
        "ranks": ("", f"{strategy.ranks[0]}"),
        "token_budget": ("", f"{budget}"),
        "max_sequences": ("", f"{min(strategy.max_sequences[0], budget)}"),
        "block_tokens": ("", f"{strategy.block_tokens}"),
        "prefill": (strategy.prefill[0], ""),
        "order": (strategy.order[0], ""),
        "prefix_caching": (str(strategy.prefix_caching).lower(), ""),
        "ahead": (f"{min(strategy.ahead, 1)}", ""),
    }
    settings["reserve"] = (_reserve(strategy.reserve), "")
    if settings["reserve"][0] != WHOLE:
        settings["preempted"] = (strategy.preempted, "")
    if strategy.wait_steps:
        settings["wait_steps"] = ("", f"{strategy.wait_steps}")
        settings["wait_tokens"] = ("", f"{min(1.0, strategy.wait_tokens / budget):g}")
    return settings


def _reserve(room: AnswerRoom | None) -> str:
    """Returns room for answers to come as a case: none, whole or the numbers of its fields."""
    if room is None:
        return "none"
    rule = room.rule
    if rule == Reservation(1.0, 1.0):
        return WHOLE
    tokens = "" if rule.most_tokens is None else f" of {rule.most_tokens} tokens"
    return f"{rule.share:g}" + (f" to {rule.least:g} in {rule.steps} steps" if rule.steps else "") + tokens


def _notes(strategy: ContinuousBatching) -> Iterator[str]:
    if strategy.max_sequences[0] > strategy.token_budget[0]:
        yield f"engines run no more sequences than a step takes tokens: {strategy.token_budget[0]:,}"
    if strategy.ahead > 1:
        yield f"engines decide one step ahead, and the scenario {strategy.ahead}"


def _room(engine: EngineFlags, point: Point, strategy: ContinuousBatching, notes: list[str]) -> Settings:
    """Returns how large the KV cache is: by the engine's own share where the scenario has one of the same
    kind, else by what was simulated; and the longest request, where the model's own context does not fit."""
    scenario, bench = point.scenario, point.bench
    drawn = bench.draw(point.case, 0)
    room, limit = bench.room(point.case, drawn), bench.config.limit
    settings: Settings = {}
    if strategy.memory.share_of == engine.share_of and scenario.kv_blocks is None:
        settings["share"] = (engine.share_of, f"{scenario.memory_share or strategy.memory.share:g}")
    elif engine.has("kv_bytes"):
        settings["kv_bytes"] = ("", f"{floor(held_bytes(room, bench.model(point.case.ranks)))}")
    else:
        settings["kv_tokens"] = ("", f"{room.kv_tokens}")
        notes.append(
            f"its KV cache has {room.kv_tokens:,} tokens at most: fewer where its memory rule leaves less"
        )
    longest = drawn.longest_prompt + drawn.max_tokens
    if limit is not None and longest > limit.tokens:
        notes.append(
            f"requests have up to {longest:,} tokens, and engines reject those above {limit.tokens:,}"
        )
    elif limit is None or room.kv_tokens < limit.tokens:
        settings["longest"] = ("", f"{longest}")
    return settings


def _formats(engine: EngineFlags, point: Point, notes: list[str]) -> tuple[tuple[str, str], tuple[str, str]]:
    """Returns the settings `weights` and `kv`. The value of `weights` says which checkpoint the command needs
    if the model's own will not do, empty if it will."""
    dtypes, config = point.bench.hardware.dtypes, point.bench.config
    stored = number_formats(None, {}, config)
    layer = list(dict.fromkeys(dtypes.of(matrix) for matrix in LAYER))
    case, needs = layer[0], ""
    if config.quantization and all(dtypes.of(each) == stored.of(each) for each in LAYER):
        case = AS_STORED
    elif len(layer) > 1 or engine.arguments("weights", case, "") is None:
        case, needs = AS_STORED, f"with weights in {', '.join(layer)}"
    elif config.quantization:
        needs = f"with weights that are not quantized, in {case if case != 'fp8' else 'bf16'}"
    if case == "fp8":
        says = "weights are quantized while they are loaded"
        head = [matrix for matrix in HEAD if dtypes.of(matrix) == "fp8"]
        notes.append(f"{says}; LM head and embedding stay in bf16, and were priced in fp8" if head else says)
    plain = "bf16" if case in ("fp8", AS_STORED) else case
    own = case == AS_STORED and not needs and dtypes.kv == stored.kv
    return (case, needs), ("auto" if own or dtypes.kv == plain else dtypes.kv, "")


def model_name(model: str) -> str | None:
    """Returns the name on Hugging Face of a model of the catalogue, or of a config.json that says it; None if
    it has none.

    >>> model_name("llama-3.1-70b"), model_name("tiny-llama")
    ('meta-llama/Llama-3.1-70B', None)
    """
    document = read_json(model_path(model))
    for key, words in (("_name_or_path", ""), ("_source", "Hugging Face ")):
        given = document.get(key) if isinstance(document, dict) else None
        if isinstance(given, str) and given.startswith(words) and (found := HUGGING_FACE.match(given)):
            return found[1]
    return None


def _router(engine: EngineFlags, point: Point) -> tuple[str, str]:
    """Returns the command of the router in front of several servers, and why there is none."""
    count, routing = point.case.servers, point.scenario.routing
    if count == 1:
        return "", ""
    names = f"server{{1..{count}}}:8000"
    if routing in METHODS:
        return NGINX.format(method=METHODS[routing], servers=names), ""
    if routing in engine.router:
        return engine.router[routing].format(workers=f"http://{names}"), ""
    return "", f"no router for {engine.title} is known here that goes by {routing.replace('_', ' ')} routing"


# -- in words ----------------------------------------------------------------------------------------------


def lines(how: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns how to run the first of several ways, as lines for a terminal: one for each engine."""
    if not how:
        return []
    way, commands = how[0], how[0]["commands"]
    first = [f"How to run {way['point']}:", *([f"  {way['why_not']}"] if way["why_not"] else [])]
    first += [f"  {each['title']}: {each['command'] or each['why_not']}" for each in commands]
    around = [way["placed"], way["without"], *(f"router: {router}" for router in routers(commands))]
    first += [f"  {text}" for text in around if text]
    first += [f"  note: {each['title']}: {note}" for each in commands for note in each["notes"]]
    more = len(how) - 1
    ways = [f"  {more} more way{'s' if more > 1 else ''} in the report"] if more else []
    return [*first, *ways, ""]


def routers(commands: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns the routers, each once."""
    return [*dict.fromkeys(each["router"] for each in commands if each["router"])]
