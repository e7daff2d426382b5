"""The answer of a tiling study in words: the fastest schedule, Hybrid's choices, assumptions, warnings."""

from collections.abc import Mapping, Sequence

from simcore.models.long_convolution import LongConvolution
from simcore.studies.common import MOST_EXTRAPOLATED, Standing, ranged, unmeasured
from simcore.studies.tiling.cases import MEASURED
from simcore.studies.tiling.figures import CaseResult
from simcore.studies.tiling.implementations import Choice, ranges
from simcore.studies.tiling.runner import Bench
from simcore.studies.tiling.strategies import Fractal

LAZY = "lazy"


def answer(results: Sequence[CaseResult]) -> str:
    """Returns the fastest strategy, its time per token and over lazy, and its tiles, in words."""
    groups = list(_by_point(results).values())
    if len(groups) == 1:
        return _single(_fastest(groups[0]), results)
    # A point at which only one strategy fits into memory compares nothing.
    compared = [group for group in groups if len(group) > 1] or groups
    winners: dict[str, list[CaseResult]] = {}
    for one in map(_fastest, compared):
        winners.setdefault(one.case.axes.label, []).append(one)
    wins = [_several(label, own, len(compared), results) for label, own in winners.items()]
    alone = len(groups) - len(compared)
    more = f" At {alone} more, only one fits into memory." if alone else ""
    return f"{'; '.join(wins)}.{more}"


def standings(results: Sequence[CaseResult]) -> list[Standing]:
    """Returns the fastest strategy at each point."""
    return [_standing(_fastest(group)) for _, group in sorted(_by_point(results).items())]


def _standing(best: CaseResult) -> Standing:
    axes, token_s = best.case.axes, best.value("total_s") / best.case.generated
    size = f"{axes.layers} layers of {axes.channels} channels"
    return Standing(
        at=f"Over {axes.tokens:,} tokens of {size}, batch {axes.batch}",
        load=(axes.tokens, axes.batch, axes.layers, axes.channels),
        label=axes.label,
        figure=f"takes {token_s * 1e3:.3g} ms a token",
        rank=(token_s,),
        seconds=token_s,
        where={name: getattr(axes, name) for name in ("layers", "channels", "tokens", "batch")},
    )


def _fastest(group: Sequence[CaseResult]) -> CaseResult:
    return min(group, key=lambda one: one.value("total_s"))


def _several(label: str, won: Sequence[CaseResult], of: int, results: Sequence[CaseResult]) -> str:
    text = f"{label} is fastest at {f'all {of}' if len(won) == of else f'{len(won)} of {of}'} points"
    known = [gain for one in won if (gain := _gain(one, results)) is not None]
    if known and label != LAZY:
        text += f", {ranged(known)} times as fast as lazy"
    each = [one.value("total_s") / one.case.generated * 1e3 for one in won]
    same = len({_taken(one) for one in won}) == 1
    return f"{text}, at {ranged(each)} ms a token{_taken(won[0]) if same else ''}"


def _single(best: CaseResult, results: Sequence[CaseResult]) -> str:
    axes, gain = best.case.axes, _gain(best, results)
    text = f"{axes.label} is fastest: {best.value('total_s') / best.case.generated * 1e3:.3g} ms a token"
    if gain is not None and axes.label != LAZY:
        text += f", {gain:.3g} times as fast as lazy"
    over = f"{best.case.generated:,} tokens"
    if axes.prompt_tokens:
        over += f" after a prompt of {axes.prompt_tokens:,}, whose time is in it,"
    return (
        f"{text}, over {over} of {axes.layers} layers, {axes.channels} channels, batch"
        f" {axes.batch}{_taken(best)}."
    )


def _taken(one: CaseResult) -> str:
    strategy = one.case.strategy
    if not isinstance(strategy, Fractal) or strategy.tiles[0] != "hybrid":
        return ""
    # With half storage the largest tile is the carry.
    taken = one.tiles[:-1] if strategy.half_storage[0] else one.tiles
    return f"; its tiles: {in_words(taken)}" if taken else ""


def in_words(choice: Choice) -> str:
    """Returns the implementations with their sides, in words.

    >>> in_words(((1, "conv"), (2, "fft"), (4, "fft")))
    'conv of side 1, fft from 2 to 4'
    """
    spans = []
    for name, first, last in ranges(choice):
        span = f"of side {first}" if first == last else f"from {first} to {last}"
        spans.append(f"{name} {span}")
    return ", ".join(spans)


def _gain(one: CaseResult, results: Sequence[CaseResult]) -> float | None:
    lazy = next((b for b in results if b.case.axes.label == LAZY and b.case.point == one.case.point), None)
    return lazy.value("total_s") / one.value("total_s") if lazy else None


def _by_point(results: Sequence[CaseResult]) -> Mapping[tuple[int, ...], list[CaseResult]]:
    groups: dict[tuple[int, ...], list[CaseResult]] = {}
    for one in results:
        groups.setdefault(one.case.point, []).append(one)
    return groups


def notes(bench: Bench, results: Sequence[CaseResult]) -> list[str]:
    """Returns the assumptions of the figures, and Hybrid's choices at each point."""
    lines = [] if bench.device.measured else _assumptions(bench, results)
    chosen: dict[str, list[str]] = {}
    for one in results:
        strategy, axes = one.case.strategy, one.case.axes
        if isinstance(strategy, Fractal) and strategy.tiles[0] == "hybrid" and one.tiles:
            where = f"{axes.layers} x {axes.channels}, batch {axes.batch}, {axes.tokens:,} tokens"
            chosen.setdefault(f"{axes.label} takes {in_words(one.tiles)}", []).append(where)
    stepped = ((one.case.axes.label, one.by_kind[0].keys()) for one in results)
    at_once = dict.fromkeys(
        label for label, kinds in stepped if "token_step" in kinds and "conv_cell" not in kinds
    )
    if at_once:
        lines.append(f"a step is one kernel, which stays for all layers: {'; '.join(at_once)}")
    if (several := bench.scenario.tokens_per_launch) > 1:
        lines.append(f"a launch computes {several} positions: the latency of a token is that of its launch")
    for choice, places in chosen.items():
        more = f" and {len(places) - 1} other points" if len(places) > 1 else ""
        lines.append(f"{choice} (at {places[0]}{more})")
    return lines


def _assumptions(bench: Bench, results: Sequence[CaseResult]) -> list[str]:
    if bench.scenario.launching == "eager":
        launching = (
            "every kernel is launched by itself and costs a launch (launch_s, launch_kernel_s) besides its"
            " work, as in PyTorch without captured graphs; the host's own time is in that"
        )
    else:
        launching = "every launch is a captured graph: a kernel costs kernel_s besides its work"
    return [
        launching,
        "each op of the model is one kernel: red cell (multiply and add), what the block has, noise with"
        " the next input, each writing where its result belongs. A framework that takes more kernels has a"
        " slower block, and smaller speed-ups",
        "mixer seconds are the red cells' too: one kernel a layer and position, whatever the schedule",
        "lazy and eager read and write each number once, at the rate of device memory; fused tiles keep what"
        f" is between on the chip; {_in_cache(bench, results)}",
    ]


def _in_cache(bench: Bench, results: Sequence[CaseResult]) -> str:
    stays = [one for one in results if one.stays]
    if not stays:
        return "nothing is found in a cache"
    cases = "; ".join(f"{one.case.axes.label} of {one.case.axes.tokens:,} tokens" for one in stays)
    which = "all cases" if len(stays) == len(results) else cases
    return (
        f"nothing but the weights of steps is found in a cache, where less than"
        f" {bench.device.stays_bytes / 1e6:.0f} MB are moved from step to step: {which}"
    )


def warnings(bench: Bench, shares: Mapping[str, float], results: Sequence[CaseResult]) -> list[str]:
    """Returns warnings about unmeasured and extrapolated prices."""
    if bench.device.measured:
        return []
    lines, far = unmeasured(shares, bench.device.name), shares.get("extrapolated", 0.0)
    if far > MOST_EXTRAPOLATED:
        lines.append(f"{far:.0%} of the device time is from extrapolated prices")
    models = [bench.model(one.case) for one in results]
    if bench.scenario.model.step == "auto" and (by_layers := _not_in_one_launch(bench, models)):
        lines.append(
            f"model.step: auto takes the kernels of each layer at {'; '.join(by_layers)}: a step in one"
            " launch, which may be several times faster, was measured of other shapes only"
        )
    steps = {model.token_step.without_place for model in models if model.one_launch}
    if any(bench.device.price(op).source not in MEASURED for op in steps):
        lines.append(
            f"model.step: a step in one launch was never measured on {bench.device.name}; its price is what"
            " its bytes and operations take at least, and such kernels take many times that"
        )
    return lines


def _not_in_one_launch(bench: Bench, models: Sequence[LongConvolution]) -> list[str]:
    """Returns the models whose step could be one launch, and whose price of it is only extrapolated."""
    able = [model for model in models if model.mixer == "convolution" and not model.one_launch]
    price = bench.device.price
    far = [model for model in able if price(model.token_step.without_place).source == "extrapolated"]
    return [*dict.fromkeys(f"{one.layers} x {one.channels}, batch {one.batch}" for one in far)]
