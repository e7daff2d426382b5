"""Serving engines as they are shipped: `catalog/<engine>-<version>.yaml`, and how a scenario takes them."""

from simcore.studies.serving.engines.presets import (
    Engine,
    engine_names,
    load_engine,
    pinned,
    usual,
    with_engines,
)

__all__ = ["Engine", "engine_names", "load_engine", "pinned", "usual", "with_engines"]
