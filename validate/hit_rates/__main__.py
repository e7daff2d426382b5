"""`python -m simcore.validate.hit_rates`: how often attention-level speculation hits, and what it costs.

It trains a small decoder on tasks whose answers stand in the prompt, or takes the weights of a Llama, and
decodes with early results of attention taken by the paper's rule: see `decoding` and `study`.

The defaults are for a card. A step of training is 6 x 3.3 million weights x 49,152 bytes, with attention
some 1.3 TFLOP, and moves some 50 GB of activations: 40 to 60 ms on an H100 by reckoning, so 3,000 steps take
two to three minutes. That was not measured, nor that the tasks are learnt by then: if not, the study says so.
On a CPU 2 layers of 64 learn contexts of 64 in 1,000 steps of 2,048 bytes of each task, a minute or two.
Exit codes: 1 for a decoder that has not learnt its tasks and for a broken law, 2 for bad input.
"""

import math
import platform
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import torch
import typer

from simcore.input.files import InputError, plain
from simcore.models.decoder_config import CONFIG, ModelError, load_config
from simcore.terminal import BROKEN, failed, note
from simcore.validate.hit_rates import tasks
from simcore.validate.hit_rates.network import Network, in_format, network
from simcore.validate.hit_rates.study import Asked, Row, broken_laws, draws, rows, worst_exact
from simcore.validate.hit_rates.training import REPORTED, Training, decoder_of, trained
from simcore.validate.machines.buffers.checkpoint import read_checkpoint
from simcore.validate.program import aligned, check_out, run, write_csv

LAMBDAS = "0,0.05,0.1,0.15,0.2,0.25,0.3,0.4,0.5,0.75,1"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
# A decoder that solves less of a task with exact attention has not learnt it.
LEARNT = 0.8
# A longer context is a mistake.
MOST_CONTEXT = 1 << 24


def numbers(
    option: str, words: str, least: float, most: float = math.inf, *, whole: bool = False
) -> list[float]:
    """Returns the comma-separated numbers of an option, in their order and each once. Raises InputError for
    none, and for one that is no number from `least` to `most` (infinity is one, unless they are `whole`)."""
    found = []
    for word in filter(None, (word.strip() for word in words.split(","))):
        try:
            value = float(word)
        except ValueError:
            value = math.nan
        if not least <= value <= most or (whole and not value.is_integer()):
            kind = "whole numbers" if whole else "numbers"
            to = f" to {most:,.0f}" if math.isfinite(most) else ""
            raise InputError(f"{option}: {plain(word)} is given; {kind} from {least:g}{to} are needed")
        found.append(value)
    if not found:
        raise InputError(f"{option}: names none")
    return list(dict.fromkeys(found))


def device_of(name: str | None) -> torch.device:
    """Returns the device of an option: cuda by default if there is one. Raises InputError for another."""
    has = torch.cuda.is_available()
    name = name or ("cuda" if has else "cpu")
    if name not in ("cpu", "cuda"):
        raise InputError(f"--device {plain(name)}: cpu and cuda are allowed")
    if name == "cuda" and not has:
        raise InputError("--device cuda: there is no CUDA device")
    return torch.device(name)


def llama(folder: Path, device: torch.device, dtype: torch.dtype) -> Network:
    """Returns the Llama of a Hugging Face directory. Raises InputError where there is none with weights."""
    try:
        config = load_config(folder / CONFIG)
    except ModelError as error:
        raise InputError(f"--model {folder}: {error}") from None
    if config.weights is None:
        raise InputError(f"--model {folder}: has no safetensors beside {CONFIG}")
    return network(config, read_checkpoint(config, device), dtype)


def check_sizes(contexts: Sequence[int], chunk: int, hidden: int, heads: int) -> None:
    """Raises InputError for contexts without a middle that speculation leaves out, and for heads that do not
    fit."""
    least = max(tasks.SHORTEST, 2 * chunk + 1)
    for context in contexts:
        if context < least:
            raise InputError(
                f"--contexts: {context} is given; with chunks of {chunk} at both ends {least} are needed"
            )
    if hidden % (2 * heads):
        raise InputError(f"--hidden: {hidden} does not divide into {heads} heads of even size")


def table(found: Sequence[Row]) -> Iterator[str]:
    """Yields the rows as a plain table; layers are in the file alone."""
    lines = [["task", "context", "mode", "lambda", "score", "95 %", "agreement", "accepted", "forced", ""]]
    for row in found:
        scored = row["score"] != ""
        lines.append(
            [
                str(row["task"]),
                str(row["context"]),
                str(row["mode"]),
                f"{row['lambda']:g}",
                f"{row['score']:.3f}" if scored else "-",
                f"{row['score_low']:.3f}-{row['score_high']:.3f}" if scored else "-",
                *(f"{row[name]:.3f}" for name in ("agreement", "accepted", "accepted_forced")),
                "",
            ]
        )
    yield from aligned(lines)


def record(net: Network, device: torch.device, dtype: str, asked: Asked) -> Row:
    """Returns what every row says of the study: sizes, seed, device, versions, date."""
    config = net.config
    card = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    return {
        "chunk": asked.chunk,
        "seed": asked.seed,
        "layers": config.layers,
        "hidden": config.hidden,
        "q_heads": config.q_heads,
        "kv_heads": config.kv_heads,
        "dtype": dtype,
        "device": f"{device.type} {card}",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": datetime.now(UTC).date().isoformat(),
    }


def learn(how: Training, sizes: tuple[int, int, int], device: torch.device) -> tuple[Network, Row]:
    """Trains a decoder of (layers, hidden, heads); returns it, and what rows say of its training."""
    net, losses = trained(
        decoder_of(*sizes),
        how,
        device,
        lambda step, loss: note(f"training: step {step} of {how.steps}, loss {loss:.3f}"),
    )
    last = losses[-REPORTED:]
    loss = sum(last) / len(last) if last else ""
    return net, {"train_steps": how.steps, "train_tokens": how.tokens, "rate": how.rate, "train_loss": loss}


def main(
    out: Annotated[Path | None, typer.Option(help="a CSV file to write")] = None,
    model: Annotated[Path | None, typer.Option(help="a Hugging Face Llama; else one is trained")] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda")] = None,
    dtype: Annotated[str | None, typer.Option(help="of decoding: fp32, bf16; by device")] = None,
    lambdas: Annotated[str, typer.Option(help="thresholds; inf takes early results always")] = LAMBDAS,
    contexts: Annotated[str, typer.Option(help="tokens of prompts")] = "384,768",
    chunk: Annotated[int, typer.Option(min=1, help="tokens at each end that are attended to early")] = 128,
    prompts: Annotated[int, typer.Option(min=1, help="of each task and context")] = 512,
    tokens: Annotated[int, typer.Option(min=1, help="tokens to decode, with --model")] = 16,
    seed: Annotated[int, typer.Option(min=0, max=2**31 - 1)] = 0,
    layers: Annotated[int, typer.Option(min=1)] = 4,
    hidden: Annotated[int, typer.Option(min=2)] = 256,
    heads: Annotated[int, typer.Option(min=1)] = 8,
    steps: Annotated[int, typer.Option(min=0, help="training steps")] = 3000,
    train_tokens: Annotated[int, typer.Option(min=1, help="bytes of each task a step")] = 24576,
    rate: Annotated[float, typer.Option(min=0.0, help="peak learning rate")] = 1e-3,
    batch_tokens: Annotated[int, typer.Option(min=1, help="of prompts computed at once")] = 65536,
    untrained: Annotated[bool, typer.Option("--untrained", help="also if tasks are not learnt")] = False,
) -> None:
    """Measures hit rates and answers of attention-level speculation by lambda."""
    check_out(out)
    where = device_of(device)
    dtype = dtype or ("bf16" if where.type == "cuda" else "fp32")
    if dtype not in DTYPES:
        raise InputError(f"--dtype {plain(dtype)}: {' and '.join(DTYPES)} are allowed")
    asked = Asked(
        lambdas=tuple(numbers("--lambdas", lambdas, 0)),
        contexts=tuple(map(int, numbers("--contexts", contexts, 1, MOST_CONTEXT, whole=True))),
        chunk=chunk,
        prompts=prompts,
        seed=seed,
        batch_tokens=batch_tokens,
    )
    check_sizes(asked.contexts, chunk, hidden, heads)
    if not math.isfinite(rate):
        raise InputError(f"--rate: {rate} is given; a number is needed")
    if model is not None:
        net, learnt = llama(model, where, DTYPES[dtype]), Row()
    else:
        how = Training(asked.contexts, steps, train_tokens, rate, seed)
        net, learnt = learn(how, (layers, hidden, heads), where)
        net = in_format(net, DTYPES[dtype])
    said = {"model": "trained" if model is None else model.resolve().name, **record(net, where, dtype, asked)}
    found = [{**row, **said, **learnt} for row in rows(net, draws(net, model is None, tokens), asked)]
    worst = worst_exact(found)
    if worst is not None and float(str(worst["exact_score"])) < LEARNT and not untrained:
        task, context = worst["task"], worst["context"]
        missed = f"{task} at context {context}: exact attention solves {worst['exact_score']:.3f}"
        message = f"{missed}, less than {LEARNT}: train longer (--steps), or take it so (--untrained)"
        raise typer.Exit(failed(message, BROKEN))
    for line in table(found):
        print(line)
    if wrong := broken_laws(found):
        raise typer.Exit(failed(wrong[0], BROKEN))
    if out is not None:
        write_csv(found, out)


if __name__ == "__main__":
    run(main)
