"""simcore from Python, cell by cell: a script, or a notebook in an editor that knows `# %%`."""

# %% A scenario is a file, or its content.
import tempfile
from pathlib import Path

import simcore

chat = {
    "name": "chat",
    "study": "serving",
    "device": "h200-sxm",
    "model": "llama-3.1-8b",
    "workload": {
        "requests": 120,
        "arrivals": {"kind": "poisson", "rate_per_s": [8, 24]},
        "prompt_tokens": {"kind": "lognormal", "mean": 512, "cv": 0.8, "max": 4096},
        "output_tokens": {"kind": "uniform", "low": 64, "high": 384},
    },
    "strategies": [{"kind": "continuous_batching"}],
    "slo": {"ttft_s": 0.5, "tpot_s": 0.03},
}
result = simcore.run(chat)
print(result.answer)
print(*result.warnings, sep="\n")

# %% All figures in one tidy frame: a row for each, with its unit, its interval, the source of its price.
figures = result.frame()
p99 = figures[figures["metric"] == "ttft_p99_s"]
print(p99[["label", "rate_per_s", "value", "low", "high", "unit"]].to_string(index=False))

# %% Every request: when it came, when its first and its last token came, how often it was preempted.
requests = result.requests()
print((requests["first_token_s"] - requests["arrival_s"]).describe())

# %% What if the card had twice the memory rate? `settings` change fields as --set does.
faster = simcore.run(chat, settings={"device.change": {"hbm_bytes_per_s": {"times": 2}}})
both = simcore.compare(result, faster)
print(both[both["metric"].isin(["tpot_p50_s", "ttft_p99_s"])].to_string(index=False))

# %% The page that the command line writes, as one file; or the whole run directory.
with tempfile.TemporaryDirectory() as folder:
    page = result.report(Path(folder) / "chat.html")
    print(page.name, page.stat().st_size > 0)
    run = result.write(Path(folder) / "run")
    print(sorted(path.name for path in run.iterdir()))
    # A run directory can be compared too.
    print(len(simcore.compare(run, faster)) == len(both))
