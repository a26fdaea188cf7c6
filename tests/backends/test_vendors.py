"""What is special about the vendors' attention kernels: plans, lengths, masks, bases of logarithms.

The contract tests find the kernels by themselves; here stand the traps that a card showed. Tests that need
the card say so; the others imagine one.
"""

from __future__ import annotations

import functools
import importlib.metadata
from typing import Any

import pytest
import torch
from torch import Tensor

from layerzero.backends import availability
from layerzero.backends.flashinfer import planning
from layerzero.kvcache import KVCacheSpec, PagedCache
from layerzero.ops import host_copies, table
from layerzero.ops.op import Args
from layerzero.spec import tolerances
from layerzero.spec.hardware import hypothetical_gpu
from layerzero.spec.kernel import Kernel, rejections
from layerzero.spec.reasons import Reason
from tests.backends import cases

BY_ID = {k.id: k for k in cases.KERNELS}
VENDORS = ("flashinfer", "flash_attn_2", "flash_attn_3", "vllm_flash_attn_3", "flash_attn_4", "xformers")
# Those that take keys and values as codes have tests of their own: tests/cuda/test_codes.py.
PAGED = [
    k
    for k in cases.KERNELS
    if k.op == "paged_attention" and "cuda" in k.capability.platforms and not k.id.endswith("codes")
]
RAGGED = [k for k in cases.KERNELS if k.op == "ragged_attention" and "cuda" in k.capability.platforms]
DENSE = [k for k in cases.KERNELS if k.op == "attention" and k.capability.platforms == {"cuda"}]
HOPPER = hypothetical_gpu(90)

gpu = pytest.mark.gpu


def of(kernels: list[Kernel]) -> pytest.MarkDecorator:
    """One test for each kernel."""
    return pytest.mark.parametrize("kernel", kernels, ids=[k.id for k in kernels])


@functools.cache
def loaded(kernel: Kernel) -> Any:
    """The kernel's callable, or a skip that says what is missing."""
    if cases.DEVICE != "cuda":
        pytest.skip("needs CUDA: set LAYERZERO_TEST_DEVICE=cuda on a machine that has it")
    if missing := cases.why_not_here(kernel):
        pytest.skip(missing)
    return kernel.load()


def rand(*shape: int) -> Tensor:
    """Normal numbers on the device under test, in bfloat16."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))).to(
        cases.DEVICE, torch.bfloat16
    )


def near(op: str, args: Args, out: Any) -> list[str]:
    """Where a result is further from the float64 reference than the tolerances allow."""
    truths = cases.truth(table.get(op), cases.to("cpu", args))
    bases = cases.as_tuple(table.get(op).reference(*cases.to("cpu", args)))
    return [
        problem
        for got, true, base in zip(cases.as_tuple(out), truths, bases, strict=True)
        for problem in tolerances.mismatches(got.cpu(), true, base.to(got.dtype))
    ]


def paged_call(kernel: Kernel, lengths: list[int], size: int = 16, **named: Any) -> Args:
    """A decode call over pages, on the device."""
    size = cases.base_of(kernel).get("P", size)
    pages = [-(-length // size) for length in lengths]
    width, total = max(*pages, 1), sum(pages) + 1
    tables = torch.zeros(len(lengths), width, dtype=torch.int32)
    order = iter(torch.randperm(total, generator=torch.Generator().manual_seed(1)).tolist())
    for row, count in enumerate(pages):
        tables[row, :count] = torch.tensor([next(order) for _ in range(count)], dtype=torch.int32)
    pools = [rand(total, size, 2, 64), rand(total, size, 2, 64)]
    built = table.get("paged_attention").build(
        rand(len(lengths), 4, 64), *pools, tables.to(cases.DEVICE),
        torch.tensor(lengths, dtype=torch.int32).to(cases.DEVICE), **named,
    )  # fmt: skip
    args: Args = built[1]
    return args


# -- on an imagined card ----------------------------------------------------------------------------------


def test_every_vendor_names_what_to_install() -> None:
    """A kernel whose library is missing says so, and how to get it."""
    for kernel in cases.KERNELS:
        if kernel.backend not in VENDORS:
            continue
        name = kernel.distributions[0].split(">")[0]
        try:
            importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            missing = [r for r in availability(kernel) if r.reason is Reason.BACKEND_MISSING]
            assert any(name in (r.counterfactual or "") for r in missing), (kernel.id, missing)


@pytest.mark.parametrize("width", [32, 72, 96, 192, 320])
def test_flashinfer_refuses_head_sizes_without_a_template(width: int) -> None:
    """It would run them all the same, and wrongly."""
    for op in ("attention", "ragged_attention", "paged_attention"):
        call = cases.call(cases.Case(op, dims={"D": width}), torch.bfloat16)
        request = (
            table.get(op).check(call).replace(platform="cuda", layout="BSHD" if op == "attention" else "NHD")
        )
        for variant in ("fa2", "fa3"):
            reasons = rejections(BY_ID[f"flashinfer.{op}.{variant}"], request, HOPPER)
            assert [r.needs for r in reasons if r.field == "D"] == ["one of 64, 128, 256"]


def test_flash_attention_4_refuses_pages_that_hold_whole_tiles() -> None:
    """What stands behind a length in such a page reaches the output."""
    call = cases.call(cases.Case("paged_attention", dims={"D": 64, "P": 128}), torch.bfloat16)
    request = table.get("paged_attention").check(call).replace(platform="cuda")
    reasons = rejections(BY_ID["flash_attn_4.paged_attention.page_table"], request, HOPPER)
    assert [r.field for r in reasons] == ["P"]


@pytest.mark.parametrize("sm", [80, 100, 120])
def test_kernels_for_one_family_refuse_the_others(sm: int) -> None:
    """Hopper's kernels are not Blackwell's, although its number is greater."""
    call = cases.call(cases.Case("ragged_attention", dims={"D": 64}), torch.bfloat16)
    request = table.get("ragged_attention").check(call).replace(platform="cuda")
    for name in ("flashinfer.ragged_attention.fa3", "flash_attn_3.ragged_attention.varlen"):
        reasons = {r.reason for r in rejections(BY_ID[name], request, hypothetical_gpu(sm))}
        assert reasons == {Reason.SM_TOO_OLD if sm < 90 else Reason.SM_TOO_NEW}


def test_pages_in_compressed_rows() -> None:
    """Only what a length reaches is taken, in order; an empty sequence has no page."""
    tables = torch.tensor([[7, 3, 9], [5, 0, 0], [0, 0, 0], [1, 2, 8]])
    pages = planning.CompressedBlockTables.of(tables, torch.tensor([9, 1, 0, 12]), 4)
    assert pages.starts.tolist() == [0, 3, 4, 4, 7]
    assert pages.ids.tolist() == [7, 3, 9, 5, 1, 2, 8]
    assert pages.last.tolist() == [1, 1, 0, 4]
    full = planning.CompressedBlockTables.of(tables[[0, 3]], torch.tensor([12, 10]), 4)
    assert full.ids.tolist() == [7, 3, 9, 1, 2, 8]


def test_lengths_without_a_host_copy_serve_one_call() -> None:
    """Two calls with one bare tensor have different keys; with a host copy they have one, until an edit."""
    bare = torch.tensor([1, 2])
    assert planning.PlanKey.of("flags", bare) != planning.PlanKey.of("flags", bare)
    assert not planning.PlanKey.of("flags", bare).keepalive
    known = host_copies.attach_host_copy(torch.tensor([1, 2]), torch.tensor([1, 2]))
    assert planning.PlanKey.of("flags", known) == planning.PlanKey.of("flags", known)
    assert planning.PlanKey.of("flags", known) != planning.PlanKey.of("others", known)
    before = planning.PlanKey.of("flags", known)
    known[0] = 5
    assert planning.PlanKey.of("flags", known) != before


# -- on the card ------------------------------------------------------------------------------------------


@gpu
@of(PAGED)
@pytest.mark.parametrize("known", [False, True], ids=["bare", "host_copy"])
def test_tables_edited_in_place_are_seen(kernel: Kernel, known: bool) -> None:
    """The same tensor objects, appended to in place between two calls: the second sees the new tokens."""
    run = loaded(kernel)
    args = paged_call(kernel, [5, 33, 70, 16])
    tables, lengths = args[3], args[4]
    if known:
        for tensor in (tables, lengths):
            host_copies.attach_host_copy(tensor, tensor.cpu())
    assert not near("paged_attention", args, run(*args))
    lengths[0] = 16
    lengths[2] = 49
    tables[1] = tables[2].roll(1)
    assert not near("paged_attention", args, run(*args))


@gpu
@of(PAGED)
def test_a_sequence_without_keys_gives_nothing(kernel: Kernel) -> None:
    """Zeros and minus infinity, beside sequences that have keys."""
    run = loaded(kernel)
    args = paged_call(kernel, [0, 7, 0, 40])
    assert not near("paged_attention", args, run(*args))
    if "lse" in kernel.capability.features:
        lse = run(*paged_call(kernel, [0, 7, 0, 40], return_lse=True))[1]
        assert torch.isneginf(lse).all(-1).tolist() == [True, False, True, False]


@gpu
@of(PAGED)
@pytest.mark.parametrize("size", [16, 64])
def test_what_stands_behind_a_length_is_never_read(kernel: Kernel, size: int) -> None:
    """Not even where it is NaN, in the last page and in pages of nobody."""
    run = loaded(kernel)
    args = paged_call(kernel, [3, 65, 17], size)
    clean = run(*args)
    tables, lengths, page = args[3], args[4].tolist(), args[1].shape[1]
    used = torch.zeros(args[1].shape[:2], dtype=torch.bool)
    for row, length in enumerate(lengths):
        for token in range(length):
            used[tables[row, token // page].item(), token % page] = True
    for pool in args[1:3]:
        pool[~used.to(pool.device)] = torch.nan
    assert torch.equal(run(*args), clean)


@gpu
@of(PAGED)
def test_a_plan_serves_every_layer_of_a_step(kernel: Kernel) -> None:
    """One step's tables over two pools and two streams, as a cache gives them."""
    run = loaded(kernel)
    if "P" in cases.base_of(kernel):
        pytest.skip("its pages are larger than this cache's")
    spec = KVCacheSpec(num_kv_heads=2, head_dim=64, dtype=torch.bfloat16, device=torch.device("cuda:0"))
    cache = PagedCache(spec, pages=32, page_size=16)
    sequences = [cache.new() for _ in range(3)]
    for sequence, count in zip(sequences, (20, 1, 47), strict=True):
        cache.append(sequence, rand(count, 2, 64), rand(count, 2, 64))
    q = rand(3, 4, 64)
    for layer in range(4):
        keys = cache.k_cache + layer
        args = table.get("paged_attention").build(q, keys, cache.v_cache, *cache.block_tables(sequences))[1]
        with torch.cuda.stream(torch.cuda.Stream()) if layer % 2 else torch.cuda.stream(None):
            torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
            out = run(*args)
        torch.cuda.synchronize()
        assert not near("paged_attention", args, out)


@gpu
@of([k for k in PAGED if k.backend == "flashinfer"])
@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("worth", [0, 1 << 40], ids=["shared", "apart"])
def test_pages_that_are_shared_are_read_once(
    kernel: Kernel, queries: int, worth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sequences with a common beginning: the same numbers and log-sum-exps whichever way they are read."""
    from layerzero.backends.flashinfer import cascade as prefix

    run = loaded(kernel)
    monkeypatch.setattr(prefix, "WORTH_BYTES", worth)
    planned: list[int] = []
    plan = prefix.CascadeWrapper.plan

    def seen(self: Any, *args: Any) -> None:
        plan(self, *args)
        planned.append(self.num_shared_pages)

    monkeypatch.setattr(prefix.CascadeWrapper, "plan", seen)
    tables = torch.tensor([[9, 2, 0, 4], [9, 2, 1, 5], [9, 2, 3, 0]], dtype=torch.int32)
    lengths = torch.tensor([64, 40, 36], dtype=torch.int32)
    known = (
        host_copies.to_device_with_host_copy(tables, cases.DEVICE),
        host_copies.to_device_with_host_copy(lengths, cases.DEVICE),
    )
    named: dict[str, Any] = {"is_causal": True, "return_lse": True}
    if queries > 1:
        named["cu_seqlens_q"] = host_copies.to_device_with_host_copy(
            torch.arange(4, dtype=torch.int32) * queries, cases.DEVICE
        )
    q, pools = rand(3 * queries, 4, 64), [rand(10, 16, 2, 64), rand(10, 16, 2, 64)]
    build = table.get("paged_attention").build
    args = build(q, *pools, *known, **named)[1]
    without_lse = build(q, *pools, *known, **named | {"return_lse": False})[1]
    known_lse = table.get("paged_attention").reference(*cases.to("cpu", args))[1]
    for _ in range(2):
        out, lse = run(*args)
        assert not near("paged_attention", without_lse, out)
        torch.testing.assert_close(lse.cpu(), known_lse, rtol=2e-3, atol=2e-3)  # scores are rounded
    assert planned == [2 if worth == 0 else 0]


@gpu
@of([k for k in PAGED + RAGGED if k.capability.graph_safe])
def test_a_captured_call_follows_lengths_that_change(kernel: Kernel) -> None:
    """What a graph was captured with is no bound on what it is replayed with."""
    run = loaded(kernel)
    if kernel.op == "paged_attention":
        args = paged_call(kernel, [5, 33, 70, 16])
    else:
        offsets = host_copies.to_device_with_host_copy(
            torch.tensor([0, 2, 4, 12], dtype=torch.int32), cases.DEVICE
        )
        args = table.get(kernel.op).build(rand(12, 4, 64), rand(12, 4, 64), rand(12, 4, 64), offsets)[1]
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        run(*args)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        out = run(*args)
    if kernel.op == "paged_attention":
        args[4].copy_(torch.tensor([16, 1, 66, 9]))
    else:
        args[3].copy_(torch.tensor([0, 1, 1, 12]))
    graph.replay()
    torch.cuda.synchronize()
    assert not near(kernel.op, args, out)


@gpu
@of(RAGGED)
def test_ragged_sequences_without_queries_or_keys(kernel: Kernel) -> None:
    """Empty sequences in front, between and behind; queries without keys give nothing."""
    run = loaded(kernel)
    offsets = torch.tensor([0, 0, 5, 5, 9, 12], dtype=torch.int32).to(cases.DEVICE)
    keys = torch.tensor([0, 4, 40, 45, 45, 60], dtype=torch.int32).to(cases.DEVICE)
    for is_causal in (False, True):
        args = table.get("ragged_attention").build(
            rand(12, 4, 64), rand(60, 4, 64), rand(60, 4, 64), offsets, keys, is_causal=is_causal
        )[1]
        assert not near("ragged_attention", args, run(*args))


@gpu
@of([k for k in DENSE + RAGGED if "lse" in k.capability.features])
def test_the_log_sum_exp_is_natural(kernel: Kernel) -> None:
    """A sequence of n equal scores has the natural log of n, whatever base the library counts in."""
    run = loaded(kernel)
    if kernel.op == "attention":
        q, kv = torch.zeros(1, 8, 4, 64), torch.zeros(1, 100, 4, 64)
        built = table.get("attention").build(q, kv, kv, layout="BSHD", return_lse=True)
        if kernel.capability.layouts != {"BSHD"}:
            built = table.get("attention").build(*(t.transpose(1, 2) for t in (q, kv, kv)), return_lse=True)
    else:
        q, kv = torch.zeros(8, 4, 64), torch.zeros(100, 4, 64)
        ends = torch.tensor([0, 8]), torch.tensor([0, 100])
        built = table.get("ragged_attention").build(q, kv, kv, *ends, return_lse=True)
    args = tuple(a.bfloat16() if isinstance(a, Tensor) and a.is_floating_point() else a for a in built[1])
    lse = run(*cases.to(cases.DEVICE, args))[1]
    torch.testing.assert_close(lse.cpu(), torch.full(lse.shape, 100.0).log())


@gpu
@of(DENSE)
@pytest.mark.parametrize("lengths", [(1, 64), (3, 64), (64, 64), (200, 333)])
def test_causal_is_aligned_at_the_last_query(kernel: Kernel, lengths: tuple[int, int]) -> None:
    """Some libraries align at the first: a decode step would see one key of sixty-four."""
    run = loaded(kernel)
    q, k, v = (rand(2, n, 4, 64) for n in (lengths[0], lengths[1], lengths[1]))
    if kernel.capability.layouts == {"BSHD"}:
        args = table.get("attention").build(q, k, v, is_causal=True, layout="BSHD")[1]
    else:
        args = table.get("attention").build(
            *(t.transpose(1, 2).contiguous() for t in (q, k, v)), is_causal=True
        )[1]
    if rejections(kernel, table.get("attention").check(args), cases.HERE):
        pytest.skip("refuses the call")
    assert not near("attention", args, run(*args))


@gpu
@of([k for k in cases.KERNELS if k.compile is not None])
def test_a_unit_is_compiled_by_a_call_like_the_one_asked_for(kernel: Kernel) -> None:
    """Plain, causal and prefill requests alike; afterwards the same request compiles nothing new."""
    loaded(kernel)
    assert kernel.compile is not None
    op, built = table.get(kernel.op), 0
    for asks in ((), ("causal", "gqa"), ("prefill", "lse", "causal")):
        known = cases.asking(kernel, *(a for a in asks if a in kernel.capability.features))
        layout = ("bshd",) if kernel.op == "attention" else ()
        case = cases.Case(kernel.op, (*layout, *known), {"D": 64} | cases.base_of(kernel))
        request = op.check(cases.call(case, torch.bfloat16))
        if not rejections(kernel, request, cases.HERE):
            kernel.compile(request)
            built += 1
    assert built >= 2


@gpu
def test_cudnn_is_not_asked_where_a_row_may_see_nothing() -> None:
    """It writes arbitrary numbers there, and torch's own choice is to ask it."""
    loaded(BY_ID["torch.attention.sdpa_cudnn"])
    mask = torch.ones(1, 1, 8, 64, dtype=torch.bool, device=cases.DEVICE)
    mask[..., 3, :] = False
    args = table.get("attention").build(*(rand(1, 2, n, 64) for n in (8, 64, 64)), attn_mask=mask)[1]
    request = table.get("attention").check(args)
    refused = [
        k.id
        for k in DENSE
        if Reason.EMPTY_ROWS_UNSAFE in {r.reason for r in rejections(k, request, cases.HERE)}
    ]
    assert "torch.attention.sdpa_cudnn" in refused
    q, k, v = args[:3]
    garbage = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)[..., 3, :]
    assert garbage.abs().max() > 0, "torch's default writes zeros by now: the refusal may go"
