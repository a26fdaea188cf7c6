"""Sampling: FlashInfer's filters say where top-k and top-p cut, our Triton kernel proves it and draws.

Its own samplers draw from a generator of their own and cannot give a row the token that its seed gives
elsewhere. Its filters draw nothing, but keep all of several equal logits and weigh in float32, where the ops
keep the first of equals and weigh in integers: a cut that it proposes is proved by two passes over the row,
and found by sixteen where it does not hold.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from layerzero.backends.flashinfer.common import DISTRIBUTIONS, compilation_of, kernel, module
from layerzero.backends.flashinfer.planning import ROW_STATES_BYTES, row_states_buffer
from layerzero.ops.sampling.draw import Count, Number, by_top_k, by_top_p, is_constant
from layerzero.spec.call_spec import CallSpec
from layerzero.spec.kernel import Kernel


def mask_logits(library: Any, logits: Tensor, top_k: Count) -> Tensor | None:
    """Logits with -inf for what lies below each row's `top_k`-th; None where nothing is to be cut."""
    vocab = logits.shape[1]
    if isinstance(top_k, Tensor):
        counts = torch.where(top_k == 0, vocab, top_k.clamp(max=vocab)).int()
        return library.top_k_mask_logits(logits, counts, 0, row_states_buffer(logits.device))  # type: ignore[no-any-return]
    if not 0 < top_k < vocab:
        return None
    return library.top_k_mask_logits(logits, None, top_k, row_states_buffer(logits.device))  # type: ignore[no-any-return]


def shares(logits: Tensor, temperature: Number) -> Tensor:
    """What each token weighs in float32, as FlashInfer filters it; a temperature of 0 counts as 1."""
    if isinstance(temperature, Tensor):
        heat = torch.where(temperature > 0, temperature, 1.0).float().unsqueeze(-1)
        return torch.softmax(logits.float() / heat, -1)
    if temperature in (0, 1):
        return torch.softmax(logits, -1, dtype=torch.float32)
    return torch.softmax(logits.float() / temperature, -1)


def share_of_all(top_p: Number, top_k: Count, mask: Tensor | None, weights: Tensor) -> float | Tensor:
    """`top_p` as a share of all that a mask kept (B,), which may be more than `top_k`: equals of the last."""
    share = top_p.float() if isinstance(top_p, Tensor) else float(top_p)
    if mask is None:
        return share
    hidden = torch.isneginf(mask)
    num_kept = torch.where(top_k == 0, mask.shape[1], top_k) if isinstance(top_k, Tensor) else top_k
    beyond = (mask.shape[1] - hidden.sum(-1) - num_kept).clamp_min(0)
    return share * (1.0 - beyond * weights.masked_fill(hidden, 1.0).amin(-1))


def _sample() -> Callable[..., Any]:
    from layerzero.backends.triton_kernels.sampling import sample_with_proposals

    sampling = module("flashinfer.sampling")
    library = sampling.get_sampling_module()

    def sample(
        logits: Tensor, temperature: Number, top_k: Count, top_p: Number, seed: Count, offset: Count
    ) -> Tensor:
        """`top_k_mask_logits` and `top_p_renorm_probs` propose, `sample_with_proposals` draws."""
        dense = logits.contiguous()
        mask = None if is_constant(top_k, 0) else mask_logits(library, dense, top_k)
        top_p_probs = None
        if not is_constant(top_p, 1):
            weights = shares(dense if mask is None else mask, temperature)
            top_p_probs = sampling.top_p_renorm_probs(weights, share_of_all(top_p, top_k, mask, weights))
        return sample_with_proposals(dense, temperature, top_k, top_p, seed, offset, mask, top_p_probs)

    return sample


def _filter_bytes(request: CallSpec) -> int:
    """The masked logits, three rows of float32, FlashInfer's histograms; a stream's state."""
    n, v = request.dim("N"), request.dim("V")
    rows = n * v * (4 + 3 * 4)
    return rows + n * (2 * 8192 + 512 + 8 * (v // 32 + 512)) + ROW_STATES_BYTES + (2 << 20)


# Not its speed: with these it is taken before the others, which it beats on 30 of 32 filtered calls measured.
# What is not filtered would be our Triton kernel alone, behind a compiler of a minute and a half.
_kernel = functools.partial(
    kernel,
    efficiency=(0.5, 1.0, 25.0),
    measured="benchmarks/results/sampling_h200.json",
    source="flashinfer-python 0.7.2.post1, top_k_mask_logits and top_p_renorm_probs; run on an H200",
    dtypes="float32 float16 bfloat16",
    last_stride1=True,
    batch_invariant=True,
    graph_safe=True,
    tie_break_order=36,
    distributions=(*DISTRIBUTIONS, "triton>=3.6"),
    workspace_bytes=_filter_bytes,
    on_disk=compilation_of("sampling"),
)

KERNELS: tuple[Kernel, ...] = (
    _kernel(
        "flashinfer.sample.filtered",
        _sample,
        features="seed_per_row top_k top_p top_k_and_top_p",
        only_with="top_k top_p",
    ),
    _kernel("flashinfer.sample_topk.filtered", lambda: by_top_k(_sample()), features="seed_per_row"),
    _kernel("flashinfer.sample_topp.filtered", lambda: by_top_p(_sample()), features="seed_per_row"),
)
