"""A decode step's attention over an engine's own pages, for the adapters of vLLM and SGLang.

The kernel of `paged_attention` is chosen for the call before the engine captures the shape, among kernels
that a graph may hold. What an adapter leaves to its engine is counted and logged, once a reason.
"""

from __future__ import annotations

import functools
from contextlib import nullcontext

import torch
from torch import Tensor

import layerzero as lz
from layerzero._util import log
from layerzero.calls.blocking import context_device
from layerzero.measure.shapes import paged_call
from layerzero.ops.checks import dtype_name

READY_S = 120.0  # for loading and compiling kernels before the first graph


def attend(
    engine: str, q: Tensor, k_cache: Tensor, v_cache: Tensor, tables: Tensor, lengths: Tensor, scale: float
) -> Tensor:
    """One query of each sequence, (B, Hq, D), over pages (N, P, Hk, D) that its row of `tables` names.

    `lengths` (B,) counts a sequence's keys, that of its query included. Logs the kernel, once a shape.
    """
    page = k_cache.shape[1]
    capturing = q.is_cuda and torch.cuda.is_current_stream_capturing()
    if not capturing:
        _ready(engine, q.device, q.shape[1], k_cache.shape[2], q.shape[2], page, dtype_name(q.dtype))
    # What is captured was chosen by the same call before: engines run each shape once to warm it up.
    with nullcontext() if capturing else lz.rehearse_capture():
        mixed: Tensor = lz.sync.paged_attention(q, k_cache, v_cache, tables, lengths, scale=scale)
    if not capturing:
        _note_chosen(engine, len(q), page)
    return mixed


def leave(engine: str, reason: str, query: Tensor, *, counted: bool = True) -> None:
    """Say why a call stays with the engine's own kernel; `counted` where it is a call of requests."""
    _note_own(engine, reason)
    if counted:
        context_device((query,)).counters.add("own_attention", argument=reason)


@functools.cache
def _ready(
    engine: str, device: torch.device, heads: int, key_heads: int, head_size: int, page: int, dtype: str
) -> None:
    """Have the kernels that take such a call loaded and compiled, once."""
    call = paged_call(1, heads, key_heads, 512, head_size, page, dtype)
    report = lz.warmup_blocking([call], device=str(device), timeout_s=READY_S)
    if not report.ready:
        log.warning("engine.not_warm", engine=engine, calls=[str(warmed) for warmed in report.critical])


@functools.cache
def _note_own(engine: str, reason: str) -> None:
    log.info("engine.own_attention", engine=engine, reason=reason)


@functools.cache
def _note_chosen(engine: str, sequences: int, page: int) -> None:
    selection = lz.last_selection()
    assert selection is not None, "this thread has just called"
    log.info(
        "engine.attention_chosen",
        engine=engine, sequences=sequences, page=page, kernel=selection.kernel, why=selection.why,
    )  # fmt: skip
