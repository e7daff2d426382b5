"""Triton's interpreter where there is no GPU, chosen before triton is imported; errors in the summary."""

import os

import pytest
import torch

# As the machine on a card wants it (validate/card_layer.py), before anything initialises CUDA.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """The largest of the relative errors that tests noted, by number format."""
    worst: dict[str, float] = {}
    for outcome in ("passed", "failed"):
        for report in terminalreporter.getreports(outcome):
            for name, value in report.user_properties:
                if name == "relative error":
                    worst[value[0]] = max(worst.get(value[0], 0.0), value[1])
    for formats, error in sorted(worst.items()):
        terminalreporter.write_line(f"largest relative error, {formats}: {error:.1e}")
