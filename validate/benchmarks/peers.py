"""Peers: public kernels of decode attention, called as their authors intend, on the same inputs as ours.

Each is optional: a peer that cannot be imported, or that fails in a case, is noted and left out. A peer with
settings or layouts yields several candidates, and the fastest counts.
"""

import importlib
import math
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import pad

from simcore.kernels.kernel import DTYPES
from simcore.validate.benchmarks.cases import Case
from simcore.validate.benchmarks.timing import one_line, version_of

Attend = Callable[[], Tensor]


class Inputs(NamedTuple):
    """One set of buffers: q, out [batch, q_heads, d]; k, v [batch, kv_heads, context, d], or [pages, page,
    kv_heads, d] with table [batch, pages of a sequence]; lengths [batch]; fp8 scales fp32 [kv_heads]."""

    q: Tensor
    k: Tensor
    v: Tensor
    lengths: Tensor
    out: Tensor
    table: Tensor | None = None
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None


class Candidate(NamedTuple):
    """One way to call a kernel: its settings, a call for each set of buffers that returns its output, and the
    settings in short."""

    config: str
    calls: Sequence[Attend]
    brief: str = ""


@dataclass(frozen=True, slots=True)
class Peer:
    """A public kernel. `candidates` raises the peer's own errors; `ready` imports it; `ragged`: whether it
    takes sequences of different lengths."""

    name: str
    package: str
    ready: Callable[[], object]
    candidates: Callable[[Case, Sequence[Inputs]], Iterator[Candidate]]
    ragged: bool = False

    @property
    def version(self) -> str:
        """Returns package and version."""
        return f"{self.package} {version_of(self.package)}".strip()


# -- torch -----------------------------------------------------------------------------------------------


def _sdpa(backend: Any) -> Callable[[Case, Sequence[Inputs]], Iterator[Candidate]]:
    def attend(one: Inputs) -> Tensor:
        with sdpa_kernel(backend):
            out = torch.nn.functional.scaled_dot_product_attention(
                one.q[:, :, None], one.k, one.v, enable_gqa=True
            )
        return out[:, :, 0]

    def candidates(case: Case, sets: Sequence[Inputs]) -> Iterator[Candidate]:
        del case
        yield Candidate("", [partial(attend, one) for one in sets])

    return candidates


# -- FlashInfer ------------------------------------------------------------------------------------------

WORKSPACE_BYTES = 512 << 20
FLASHINFER_HEAD_DIM = 128


@cache
def _flashinfer() -> Any:
    """Imports the package; it compiles into a scratch folder unless the environment names another."""
    major, minor = torch.cuda.get_device_capability()
    os.environ.setdefault("FLASHINFER_CUDA_ARCH_LIST", f"{major}.{minor}" + ("a" if major == 9 else ""))
    folder = Path(tempfile.gettempdir()) / f"flashinfer-{os.getuid()}"
    os.environ.setdefault("FLASHINFER_WORKSPACE_BASE", str(folder))
    # It calls ninja by name, which is beside the interpreter in a virtual environment.
    os.environ["PATH"] = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))
    return importlib.import_module("flashinfer")


def compile_ahead(dtypes: Sequence[str], say: Callable[[str], None]) -> None:
    """Starts to compile FlashInfer's kernels in the background, which takes about a minute on many cores.
    FlashInfer's own lock makes their users wait."""
    try:
        _flashinfer()
        modules: Any = importlib.import_module("flashinfer.jit.attention.modules")
        specs = [
            modules.gen_batch_prefill_module(
                "fa2", *[DTYPES[dtype]] * 3, torch.int32, *[FLASHINFER_HEAD_DIM] * 2, 0, False, False, False
            )
            for dtype in dtypes
        ]
    except Exception as error:
        say(f"FlashInfer is not compiled ahead: {one_line(error)}")
        return

    def build(spec: Any) -> None:
        # A failure here occurs again, and is noted, when the kernel is needed.
        with suppress(Exception):
            spec.build(verbose=False)

    for spec in specs:
        threading.Thread(target=build, args=(spec,), daemon=True).start()


@cache
def _flashinfer_space() -> Tensor:
    return torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")


def _flashinfer_candidates(case: Case, sets: Sequence[Inputs]) -> Iterator[Candidate]:
    """Yields its decode wrapper on tensor cores, over a cache of consecutive pages: [pages, page, kv_heads,
    d]. Planned as for a captured graph, and as for one launch."""
    wrapper_of: Any = _flashinfer().BatchDecodeWithPagedKVCacheWrapper
    # Whole pages of any size below.
    more = -case.context % 64
    rows = [
        tuple(pad(x, (0, 0, 0, more)).transpose(1, 2).contiguous() for x in (one.k, one.v)) for one in sets
    ]
    for page, for_graphs in ((16, True), (64, True), (16, False)):
        wrapper = _planned(wrapper_of, case, page, for_graphs)

        calls = list[Attend]()
        for one, kv in zip(sets, rows, strict=True):
            pages = tuple(x.view(-1, page, case.kv_heads, case.head_dim) for x in kv)
            calls.append(partial(wrapper.run, one.q, pages, out=one.out))
        yield Candidate(f"pages of {page}, planned for {'graphs' if for_graphs else 'one launch'}", calls)


def _planned(wrapper_of: Any, case: Case, page: int, for_graphs: bool) -> Any:
    each = -(-case.context // 64) * (64 // page)
    ints: Any = {"dtype": torch.int32, "device": "cuda"}
    pages = [-(-length // page) for length in case.lengths]
    indptr = torch.tensor([0, *accumulate(pages)], **ints)
    # A sequence's pages lie side by side, as many as the longest has.
    indices = torch.tensor([each * i + k for i, count in enumerate(pages) for k in range(count)], **ints)
    last = torch.tensor([(length - 1) % page + 1 for length in case.lengths], **ints)
    buffers = (
        {
            "use_cuda_graph": True,
            "paged_kv_indptr_buffer": indptr.clone(),
            "paged_kv_indices_buffer": indices.clone(),
            "paged_kv_last_page_len_buffer": last.clone(),
        }
        if for_graphs
        else {}
    )
    wrapper = wrapper_of(_flashinfer_space(), "NHD", use_tensor_cores=True, **buffers)
    dtype = DTYPES[case.dtype]
    wrapper.plan(
        indptr, indices, last, case.q_heads, case.kv_heads, case.head_dim, page,
        q_data_type=dtype, kv_data_type=dtype,
    )  # fmt: skip
    torch.cuda.synchronize()
    return wrapper


# -- xFormers --------------------------------------------------------------------------------------------


@cache
def _xformers() -> tuple[Any, Any]:
    # Its split-K kernel is Triton's and needs no compiled extension; without one xFormers refuses all calls.
    common: Any = importlib.import_module("xformers.ops.fmha.common")
    common._built_with_cuda = True
    return importlib.import_module("xformers.ops.fmha"), importlib.import_module(
        "xformers.ops.fmha.triton_splitk"
    )


def splits_to_try(case: Case, processors: int) -> list[tuple[int, int, int]]:
    """Returns splits, tokens of a block and stages to try by hand: about 1, 2 and 4 programs for each
    multiprocessor, with splits a power of two and no shorter than a block.

    >>> splits_to_try(Case(1, 4, 1, 131072), 132)
    [(128, 128, 3), (256, 64, 3), (512, 64, 2)]
    """
    found: dict[int, tuple[int, int, int]] = {}
    for each, block, stages in ((1, 128, 3), (2, 64, 3), (4, 64, 2)):
        share = each * processors / (case.batch * case.kv_heads)
        splits = 1 << max(0, round(math.log2(max(1.0, share))))
        splits = min(splits, max(1, case.context // block))
        found.setdefault(splits, (splits, block, stages))
    return list(found.values())


def _xformers_candidates(case: Case, sets: Sequence[Inputs]) -> Iterator[Candidate]:
    """Yields its Triton split-K kernel: with its own choice, and with splits set by hand."""
    fmha, splitk = _xformers()
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    operators = [("its defaults", splitk.FwOp)]
    for splits, block, stages in splits_to_try(case, processors):
        made = splitk.FwOp.get_operator(splits, block_n=block, num_warps=4, num_stages=stages)
        operators.append((f"{splits} splits, blocks of {block}, {stages} stages, 4 warps", made))
    group = case.q_heads // case.kv_heads

    def attend(one: Inputs, operator: Any) -> Tensor:
        # [batch, tokens, kv_heads, group, d]; stride 0 along the group tells the kernel that K is shared.
        q = one.q.view(case.batch, 1, case.kv_heads, group, case.head_dim)
        k, v = (x.transpose(1, 2).unsqueeze(3).expand(-1, -1, -1, group, -1) for x in (one.k, one.v))
        out: Tensor = fmha.memory_efficient_attention_forward(q, k, v, op=operator)
        return out.view(case.batch, case.q_heads, case.head_dim)

    for config, operator in operators:
        yield Candidate(config, [partial(attend, one, operator) for one in sets])


PEERS = (
    Peer("FlashInfer", "flashinfer-python", _flashinfer, _flashinfer_candidates, ragged=True),
    Peer("cuDNN", "torch", lambda: None, _sdpa(SDPBackend.CUDNN_ATTENTION)),
    Peer("flash", "torch", lambda: None, _sdpa(SDPBackend.FLASH_ATTENTION)),
    Peer("xFormers", "xformers", _xformers, _xformers_candidates),
)


def present(peers: Sequence[Peer], without: Sequence[str], say: Callable[[str], None]) -> list[Peer]:
    """Returns the peers that can be imported; says one line for each of the others."""
    found = []
    for peer in peers:
        if peer.name in without:
            say(f"{peer.name} is left out")
            continue
        try:
            peer.ready()
        except Exception as error:
            say(f"{peer.name} is not here: {one_line(error)}")
        else:
            found.append(peer)
    return found
