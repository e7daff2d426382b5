"""Every colour of the page, for the light and the dark theme, and the plotly template of each theme.

Figures are drawn in light colours. The page's script replaces each by its dark partner (`dark_partners`), so
a figure is stored once and suits both themes.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

FONT = 'system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif'

PAGE: Mapping[str, tuple[str, str]] = {
    "ground": ("#fbfbfa", "#14171b"),
    "surface": ("#ffffff", "#1b1f25"),
    "text": ("#1b2026", "#e7e9ec"),
    "muted": ("#59626d", "#9ba4af"),
    "line": ("#e2e5e8", "#2e343c"),
    "accent": ("#125c9c", "#7fb8f0"),
    "caution": ("#8a5a00", "#e5b454"),
    "caution-ground": ("#fdf6e6", "#2b2416"),
    "danger": ("#b3261e", "#ff8d83"),
    "danger-ground": ("#fdeeed", "#331c1b"),
}

# The baseline is grey and strategies compared with it have a hue; more devices have stronger shades.
Shades = Sequence[tuple[str, str]]


def _shades(light: str, dark: str) -> Shades:
    """Returns shades of a hue from faint to strong, in both themes."""
    return list(zip(light.split(), dark.split(), strict=True))


GREY = _shades("#a9b1bb #8b94a0 #6b7580 #4a535e #272e36", "#5b6570 #7a8490 #9ca5b0 #bfc6ce #e3e7eb")
BLUE = _shades("#93c4ec #5aa2db #2f80c2 #155f9e #0a4475", "#2f6ea8 #4a8fcd #6fb1eb #98caf6 #c2e1fc")
OCHRE = _shades("#e3b06b #cf9038 #ad7016 #87530a #5f3a04", "#8a5a17 #b07826 #d0983f #e5b768 #f3d39c")
VIOLET = _shades("#c6abe3 #a580d3 #8458bd #653aa0 #452270", "#66489a #8464bd #a586da #c3aaee #ddcdf8")
RED = _shades("#efab9d #e0806c #ca5742 #a63a27 #742316", "#8f3a29 #b45341 #d9735f #f09b89 #f8c5ba")
GREEN = _shades("#7cc4ab #45a686 #128665 #096349 #04432f", "#1f6b54 #2d8a6e #4aaa8b #7cc9ae #b0e3d1")
STRATEGY: Mapping[str, Shades] = {
    "tensor_parallel": GREY,
    "alspec": BLUE,
    "alspec_pipelined": OCHRE,
    "concurrent_instances": GREY,
    "dynamic_batching": RED,
    "temporal_fusion": BLUE,
    "iteration_batching": VIOLET,
    "continuous_batching": GREEN,
}
OTHER_STRATEGY = GREEN
HUES = (OCHRE, VIOLET, RED, BLUE, GREEN)
SYMBOL: Mapping[str, str] = {
    "tensor_parallel": "circle",
    "alspec": "diamond",
    "alspec_pipelined": "square",
    "concurrent_instances": "circle",
    "dynamic_batching": "square",
    "temporal_fusion": "diamond",
    "iteration_batching": "square",
    "continuous_batching": "circle",
}

# Parts of a token's critical path, in stacking order. "other": op kinds without a part. Parts that are too
# small to see are merged.
PART: Mapping[str, tuple[str, str]] = {
    "attention": ("#e09200", "#eda52f"),
    "projections": ("#56aee6", "#5fb2e8"),
    "projection with its gather": ("#8fa21c", "#b3c748"),
    "layers besides attention": ("#0a6fb0", "#3f93d2"),
    "embedding and head": ("#7a62b0", "#a08cd4"),
    "element-wise and cache": ("#0b9270", "#31b38f"),
    "communication": ("#cb4a2f", "#e56e54"),
    "speculation": ("#c4699c", "#dc8fba"),
    "host": ("#8a7d6b", "#ab9d89"),
    "other": ("#9aa2ab", "#757f8a"),
    "parts below 1 %": ("#b7a7a0", "#6f625c"),
    "idle": ("#d3d7dc", "#434b55"),
}
# Every op kind in a decoder's graphs, and every other kind of time on a critical path -> its part.
PART_OF_KIND: Mapping[str, str] = {
    "decode_attention": "attention",
    "speculative_attention": "attention",
    "paged_attention": "attention",
    "prefill_attention": "attention",
    "flash_attention_2": "attention",
    "flash_decoding": "attention",
    "split_attention": "attention",
    "linear_attention_decode": "attention",
    "linear_attention_prompts": "attention",
    "combine_splits": "attention",
    "matmul": "projections",
    "all_gather_matmul": "projection with its gather",
    "non_attention": "layers besides attention",
    "outside_layers": "embedding and head",
    "norm": "element-wise and cache",
    "rotary": "element-wise and cache",
    "kv_append": "element-wise and cache",
    "kv_copy": "element-wise and cache",
    "activation": "element-wise and cache",
    "silu": "element-wise and cache",
    "product": "element-wise and cache",
    "lrpe": "element-wise and cache",
    "residual": "element-wise and cache",
    "quantize": "element-wise and cache",
    "embedding": "element-wise and cache",
    "sample": "element-wise and cache",
    "all_reduce": "communication",
    "all_reduce_normed": "communication",
    "all_gather": "communication",
    "reduce_scatter": "communication",
    "exchange_priority": "speculation",
    "put": "speculation",
    "receive_speculation": "speculation",
    "gate": "speculation",
    "host": "host",
    "idle": "idle",
}

# Verdicts of a plan, and the hues of the lines beside them.
VERDICT: Mapping[str, tuple[str, str]] = {"holds": GREEN[2], "unsure": OCHRE[1], "fails": RED[2]}
LINE_HUES = (BLUE, OCHRE, VIOLET, GREEN, RED)

# From values measured on hardware to values that nothing supports.
PRICE_SOURCE: Mapping[str, tuple[str, str]] = {
    "measured": ("#0d4f86", "#9fd0fa"),
    "published": ("#2a7bbf", "#68afec"),
    "interpolated": ("#86bde6", "#3a78b2"),
    "carried": ("#4fa89a", "#57b8a9"),
    "roofline": ("#a5a8ad", "#6d757f"),
    "assumed": ("#d9b067", "#a37b2f"),
    "extrapolated": ("#bf3a2e", "#f0776a"),
}
DIVERGING: Sequence[tuple[str, str]] = [
    ("#9c5312", "#e39a50"),
    ("#e0b483", "#85592c"),
    ("#f1f1ef", "#2a2f37"),
    ("#8fbfe4", "#2c6599"),
    ("#11588f", "#7cbcf3"),
]
INK = ("#20262d", "#e9ebee")
FAINT_INK = ("#8d959f", "#7e8792")
HOLLOW = ("#fefefe", "#1b1f26")
FAINT_OPACITY = 0.16


def hues(strategies: Iterable[str]) -> dict[str, Shades]:
    """Returns the hue of each strategy of a run; strategies without their own take unused ones in turn."""
    names = list(strategies)
    found = {name: STRATEGY[name] for name in names if name in STRATEGY}
    left = [hue for hue in HUES if hue not in found.values()] or [OTHER_STRATEGY]
    others = (name for name in names if name not in STRATEGY)
    return found | {name: left[i % len(left)] for i, name in enumerate(others)}


def ramp(strategy: str, count: int, hue: Shades | None = None) -> list[str]:
    """Returns `count` light colours of a strategy's hue, from few devices to many."""
    shades = [light for light, _ in hue or STRATEGY.get(strategy, OTHER_STRATEGY)]
    if count == 1:
        return [shades[3]]
    steps = [round(i * (len(shades) - 1) / (count - 1)) for i in range(count)]
    if count in (2, 3):
        steps = [1, 3] if count == 2 else [0, 2, 4]
    return [shades[step] for step in steps]


def faint(colour: str) -> str:
    """Returns the same colour as a see-through fill."""
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red}, {green}, {blue}, {FAINT_OPACITY})"


def dark_partners() -> dict[str, str]:
    """Returns light colour -> dark colour for every colour that a figure may hold."""
    pairs = [INK, FAINT_INK, HOLLOW, *PART.values(), *PRICE_SOURCE.values(), *DIVERGING, *OTHER_STRATEGY]
    pairs += VERDICT.values()
    pairs += [pair for shades in STRATEGY.values() for pair in shades]
    return dict(pairs) | {faint(light): faint(dark) for light, dark in pairs}


def variables(theme: int) -> dict[str, str]:
    """Returns the CSS variables of a theme: 0 light, 1 dark."""
    return {f"--{name}": pair[theme] for name, pair in PAGE.items()}


def template(theme: int) -> dict[str, Any]:
    """Returns the settings that all figures of a theme share: 0 light, 1 dark."""
    colour = {name: pair[theme] for name, pair in PAGE.items()}
    axis = {
        "gridcolor": colour["line"],
        "linecolor": colour["line"],
        "zeroline": False,
        "automargin": True,
        "fixedrange": True,
        "ticks": "",
        "ticklabelstandoff": 5,
        "title": {"standoff": 12, "font": {"size": 12, "color": colour["muted"]}},
        "tickfont": {"size": 12, "color": colour["muted"]},
    }
    return {
        "layout": {
            "font": {"family": FONT, "size": 12, "color": colour["text"]},
            "paper_bgcolor": "rgba(0,0,0,0)",
            "plot_bgcolor": "rgba(0,0,0,0)",
            "margin": {"l": 56, "r": 16, "t": 12, "b": 48},
            "hovermode": "closest",
            "dragmode": False,
            "showlegend": False,
            "hoverlabel": {
                "bgcolor": colour["surface"],
                "bordercolor": colour["line"],
                "font": {"family": FONT, "size": 12, "color": colour["text"]},
                "align": "left",
            },
            "xaxis": axis,
            "yaxis": axis,
        }
    }
