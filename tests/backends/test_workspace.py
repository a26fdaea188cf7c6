"""What vendors' kernels allocate beyond their outputs: stated by all, and on a card no more than stated."""

from __future__ import annotations

import pytest
import torch

from layerzero.backends.flashinfer import planning
from layerzero.ops import table
from layerzero.spec.kernel import Kernel, rejections
from tests.backends import cases
from tests.backends.test_vendors import BY_ID, VENDORS, loaded, of


def test_vendors_state_what_they_allocate() -> None:
    """Every kernel of attention, so that the check of memory does not take their workspace for nothing."""
    ops = ("attention", "ragged_attention", "paged_attention", "mla_attention")
    for kernel in cases.KERNELS:
        if kernel.backend in VENDORS and kernel.op in ops:
            case = cases.Case(kernel.op, dims={"D": 64} | cases.base_of(kernel))
            request = table.get(kernel.op).check(cases.call(case, torch.bfloat16))
            assert kernel.workspace_bytes is not None, kernel.id
            assert 0 < kernel.workspace_bytes(request) < 1 << 30, kernel.id


def test_a_loss_over_chunks_states_one_chunk_and_its_gradients() -> None:
    """Not all logits at once, which is what the chunks are for; gradients come on top."""
    kernel = BY_ID["liger.linear_cross_entropy.chunked"]
    x, weight = torch.zeros(4096, 512, dtype=torch.bfloat16), torch.zeros(32000, 512, dtype=torch.bfloat16)
    target = torch.zeros(4096, dtype=torch.long)
    op = table.get(kernel.op)
    request = op.check(op.build(x, weight, target)[1])
    assert kernel.workspace_bytes is not None
    plain = kernel.workspace_bytes(request)
    assert 4096 * 512 * 2 * 2 < plain < 4096 * 32000 * 2 // 4
    learning = kernel.workspace_bytes(request.replace(modes=frozenset({"grad"})))
    assert learning - plain >= 32000 * 512 * 4


@pytest.mark.gpu
@of([k for k in cases.KERNELS if "cuda" in k.capability.platforms and k.workspace_bytes is not None])
def test_a_call_allocates_no_more_than_is_stated(kernel: Kernel) -> None:
    """Beyond its outputs, at the peak; a library's first call included."""
    run = loaded(kernel)
    op, compared = table.get(kernel.op), 0
    assert kernel.workspace_bytes is not None
    big = {"B": 2, "Hq": 4, "Hk": 4, "Sq": 512, "Sk": 512, "N": 512, "C": 256, "K": 256, "V": 4096, "F": 512}
    layout = ("bshd",) if kernel.capability.layouts == {"BSHD"} else ()
    codes = ("quant_fp8_e4m3", "inputs_quantized")
    for asks in ((), ("mask_bool",), ("lse",), ("bias",), ("act_swiglu",), codes):
        case = cases.Case(
            kernel.op, (*layout, *cases.asking(kernel, *asks)), big | {"D": 64} | cases.base_of(kernel)
        )
        args = cases.call(case, torch.bfloat16)
        request = op.check(args)
        if rejections(kernel, request, cases.HERE):
            continue
        with torch.no_grad():
            if kernel.compile is None:
                run(*args)  # what is compiled and tuned at first use is no workspace of a call
            planning.release()
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            outs = cases.as_tuple(run(*args))
            torch.cuda.synchronize()
        # Every block is rounded up, and small index tensors come and go.
        taken = torch.cuda.max_memory_allocated() - before - sum(o.untyped_storage().nbytes() for o in outs)
        assert taken <= kernel.workspace_bytes(request) + (1 << 20), str(case)
        compared += 1
    assert compared
