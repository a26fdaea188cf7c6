"""Graph capture on a GPU: proofs of real kernels, planted unsafe ones, compiled steps; skipped elsewhere."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import layerzero as lz
from layerzero.graphs.verdict import CaptureProblem
from layerzero.kvcache import TokenRange
from layerzero.selection.modes import REHEARSAL
from tests.kernels import kernel
from tests.kvcache.test_step_runner import Model, opened

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="graph capture needs a CUDA device"),
]
WIDTH = 256


@pytest.fixture
def runtime(tmp_path: Path) -> Iterator[lz.Runtime]:
    """A runtime whose proofs are kept in a folder of the test."""
    settings = lz.Settings.load(warm="off", device="cuda", state_dir=str(tmp_path), perfdb=None)
    with lz.start(settings) as opened:
        yield opened


def rows(count: int = 16, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Random rows on the GPU."""
    return torch.randn(count, WIDTH, device="cuda", dtype=dtype)


def planted(run: Callable[..., Tensor]) -> Any:
    """A kernel of the norm that would win every choice."""
    return kernel("planted.rms_norm", run, launch_us=0.01, rank=1, graph_safe=True)


def plain(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """The norm itself."""
    return functional.rms_norm(x, x.shape[-1:], weight, eps)


def item(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Reads a value on the host."""
    return plain(x, weight, eps + 0.0 * float(x[0, 0].item()))


def waits(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Waits for its stream."""
    torch.cuda.current_stream().synchronize()
    return plain(x, weight, eps)


_SIDE: list[tuple[torch.cuda.Stream, Tensor]] = []


def elsewhere(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Takes scratch memory from another stream's pool, which the graph does not own.

    What it holds for ever keeps that pool's segment: a capture begins by giving unused ones back.
    """
    if not _SIDE:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            _SIDE.append((stream, torch.empty_like(x)))
    with torch.cuda.stream(_SIDE[0][0]):
        scratch = torch.empty_like(x)
    scratch.copy_(x)
    return plain(scratch, weight, eps)


def raw(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Calls cudaMalloc itself."""
    runtime = ctypes.CDLL("libcudart.so.13")
    address = ctypes.c_void_p()
    status = runtime.cudaMalloc(ctypes.byref(address), ctypes.c_size_t(1 << 20))
    if status:
        raise RuntimeError(f"cudaMalloc gives {status}")
    runtime.cudaFree(address)
    return plain(x, weight, eps)


_SEEN: dict[int, Tensor] = {}


def remembers(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Answers what it computed first for this address: right once, stale for ever."""
    return _SEEN.setdefault(x.data_ptr(), plain(x, weight, eps)).clone()


@pytest.mark.parametrize(
    ("run", "problems"),
    [
        (item, {CaptureProblem.SYNCHRONISED}),
        (waits, {CaptureProblem.SYNCHRONISED}),
        (elsewhere, {CaptureProblem.ALLOCATED_OUTSIDE}),
        (raw, {CaptureProblem.CAPTURE_FAILED}),
        (remembers, {CaptureProblem.REPLAY_DIFFERS, CaptureProblem.INPUTS_IGNORED, CaptureProblem.NOT_SHOWN}),
    ],
)
def test_a_planted_unsafe_kernel_is_refused(
    runtime: lz.Runtime, run: Callable[..., Tensor], problems: set[CaptureProblem]
) -> None:
    """It declares itself safe; the attempt shows otherwise, and captures go to another kernel afterwards."""
    runtime.add_kernel(planted(run))
    x = rows()
    assert lz.which("rms_norm", x) == "planted.rms_norm"
    (proof,) = lz.validate_graph_capture("rms_norm", x, kernel="planted.rms_norm")
    found = {f.problem for cases in proof.cases.values() for f in cases}
    assert not proof.safe and found and found <= problems, str(proof)
    assert lz.is_graph_safe("planted.rms_norm").basis == "found unsafe"
    with lz.rehearse_capture():
        assert lz.which("rms_norm", x) != "planted.rms_norm"
    # The device is as it was: another capture works.
    assert all(p.safe for p in lz.validate_graph_capture("rms_norm", x, kernel="torch.rms_norm.cuda"))


def test_real_kernels_are_proved_and_remembered(runtime: lz.Runtime) -> None:
    """torch's kernels pass, and a later runtime over the same folder knows it without trying."""
    q, k, v = (torch.randn(2, 8, 64, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    proofs = lz.validate_graph_capture("attention", q, k, v, is_causal=True)
    safe = {p.kernel for p in proofs if p.safe}
    assert {"torch.attention.sdpa_flash", "torch.attention.sdpa_cudnn"} <= safe, [str(p) for p in proofs]
    state = runtime.settings.state_dir
    runtime.close()
    settings = lz.Settings.load(warm="off", device="cuda", state_dir=state, perfdb=None, graph_strict=True)
    with lz.start(settings, scoped=True):
        assert lz.is_graph_safe("torch.attention.sdpa_flash").basis == "proved"
        assert lz.is_graph_safe("attention", q, k, v, is_causal=True)
        assert not lz.is_graph_safe("torch.rms_norm.cuda"), "declared only, and strict asks for proofs"


@pytest.mark.parametrize("stream", [0, 1])
def test_a_rehearsed_call_is_captured_on_any_stream(runtime: lz.Runtime, stream: int) -> None:
    """Two side streams, changed inputs, and the replay equals a direct call."""
    x, w = rows(), torch.rand(WIDTH, device="cuda", dtype=torch.bfloat16)
    side = [torch.cuda.Stream(), torch.cuda.Stream()][stream]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side), lz.rehearse_capture():
        lz.sync.rms_norm(x, w)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        out = lz.sync.rms_norm(x, w)
    x.copy_(rows())
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, lz.sync.rms_norm(x, w))


def test_an_unrehearsed_call_does_not_choose_inside_a_capture(runtime: lz.Runtime) -> None:
    """It raises by name; the device goes on."""
    x = rows(7)
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(lz.CudaGraphUnsafeError, match="rehearse_capture"), torch.cuda.graph(graph):
        x.clone()  # torch warns of a graph that holds nothing
        lz.sync.rms_norm(x)
    assert not REHEARSAL.on
    assert torch.isfinite(lz.sync.rms_norm(x)).all()


def test_a_compiled_step_replays_what_it_would_compute(runtime: lz.Runtime) -> None:
    """Several ops, three buckets, padding; the replay equals the ops called directly on the padded rows."""
    weight = torch.rand(WIDTH, device="cuda", dtype=torch.bfloat16)
    up, down = (torch.randn(WIDTH, WIDTH, device="cuda", dtype=torch.bfloat16) / 16 for _ in range(2))

    def block(x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        normed, total = lz.sync.add_rms_norm(x, residual, weight)
        return lz.sync.mlp(normed, up, down, activation="gelu"), total

    step = lz.compile(block, buckets=(1, 4, 16))
    step.capture(rows(1), rows(1))
    captures = step.captures
    for count in (1, 3, 4, 11, 16, 2):
        x, residual = rows(count), rows(count)
        bucket = next(b for b in step.buckets if b >= count)
        pad = torch.zeros(bucket - count, WIDTH, device="cuda", dtype=x.dtype)
        want = block(torch.cat([x, pad]), torch.cat([residual, pad]))
        for got, whole in zip(step(x, residual), want, strict=True):
            assert torch.equal(got, whole[:count])
    assert step.captures == captures == 3


def test_a_kernel_that_comes_between_rehearsal_and_capture_leaves_the_capture_its_plan(
    runtime: lz.Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The graph holds what was rehearsed; the next call captures again, with the kernel that came."""
    real: Any = torch.cuda.graph
    late = [planted(lambda x, weight, eps: plain(x, weight, eps) + 1)]

    def graph(*args: Any, **more: Any) -> Any:
        if late:
            runtime.add_kernel(late.pop())
        return real(*args, **more)

    monkeypatch.setattr("torch.cuda.graph", graph)
    x = rows(4, torch.float32)
    step = lz.compile(lambda x: lz.sync.rms_norm(x), buckets=(4,))
    assert torch.allclose(step(x), plain(x, None, 1e-6), atol=1e-4) and not late
    assert torch.allclose(step(x), plain(x, None, 1e-6) + 1, atol=1e-4)
    step(x)
    assert step.captures == 2


def test_a_quarantined_kernel_leaves_the_graph(runtime: lz.Runtime) -> None:
    """The next call is captured anew, with another kernel."""
    runtime.add_kernel(planted(lambda x, weight, eps: plain(x, weight, eps) + 1))
    x = rows(4, torch.float32)
    step = lz.compile(lambda x: lz.sync.rms_norm(x), buckets=(4,))
    assert torch.allclose(step(x), plain(x, None, 1e-6) + 1, atol=1e-4)
    runtime.quarantine("planted.rms_norm", "a test says so")
    assert torch.allclose(step(x), plain(x, None, 1e-6), atol=1e-4)
    assert step.captures == 2


def test_calls_from_two_streams_do_not_mix(runtime: lz.Runtime) -> None:
    """A later call on another stream waits until the buffers are free."""
    norm = partial(lz.sync.rms_norm, backend="torch.rms_norm.cuda")  # another one may load meanwhile
    step = lz.compile(lambda x: norm(x), buckets=(64,))
    step.capture(rows(1))
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    inputs = [rows(64) * (i + 1) for i in range(20)]
    torch.cuda.synchronize()
    outs = []
    for number, x in enumerate(inputs):
        with torch.cuda.stream(streams[number % 2]):
            outs.append(step(x))
    torch.cuda.synchronize()
    assert all(torch.equal(out, norm(x)) for out, x in zip(outs, inputs, strict=True))


@pytest.mark.usefixtures("runtime")
def test_our_triton_kernels_are_captured_as_they_declare() -> None:
    """Every one of them declares it, and a capture of each shows it; greedy rows and drawn ones too."""
    x, residual = (torch.randn(64, 4096, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    logits = torch.randn(64, 128_256, device="cuda", dtype=torch.bfloat16)
    seeds = torch.arange(64, device="cuda")
    calls: list[tuple[str, tuple[Any, ...], dict[str, Any], str]] = [
        ("add_rms_norm", (x, residual, x[0]), {}, "triton.add_rms_norm.fused"),
        ("sample", (logits,), {"temperature": 0.0, "seed": 0}, "triton.sample.rows"),
        ("sample", (logits,), {"temperature": 0.8, "top_p": 0.9, "seed": seeds}, "triton.sample.rows"),
        ("sample_topk", (logits, 40), {"seed": seeds}, "triton.sample_topk.rows"),
        ("sample_topp", (logits, 0.9), {"seed": seeds}, "triton.sample_topp.rows"),
        ("quantize", (x,), {"format": "fp8_e4m3", "granularity": "row"}, "triton.quantize.rows"),
    ]
    for op, args, named, kernel_id in calls:
        (proof,) = lz.validate_graph_capture(op, *args, kernel=kernel_id, **named)
        assert proof.safe, (kernel_id, named, proof)
        assert lz.is_graph_safe(kernel_id)


def unsynchronised(
    runner: Callable[[list[TokenRange], Tensor], Tensor], ranges: list[TokenRange], ids: Tensor
) -> Tensor:
    """A step of the runner, which must not wait for the device."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        return runner(ranges, ids)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.usefixtures("runtime")
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_a_step_runner_replays_what_the_plain_step_gives() -> None:
    """Decode rows by graphs and a prompt beside them, in one call, turn after turn; nothing synchronises."""
    model = Model(128, 64, "cuda", torch.bfloat16)
    runner = lz.StepRunner(model.forward, model.cache, max_model_len=64, max_num_seqs=4)
    sequences = opened(model.cache, [3, 9, 0, 5])
    for turn in range(4):
        counts = [1, 1, 3 if turn == 1 else 1, 1]
        ranges = [sequence.extend(count) for sequence, count in zip(sequences, counts, strict=True)]
        ids = torch.arange(sum(counts), device="cuda") * 7 % 50
        expected = model.plain(ranges, ids)
        rows = unsynchronised(runner, ranges, ids) if turn == 3 else runner(ranges, ids)
        torch.testing.assert_close(rows, expected, rtol=2e-2, atol=2e-2)
    assert runner.captures == 1  # four rows and three share a bucket


@pytest.mark.usefixtures("runtime")
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_drafts_are_verified_by_graphs_of_decoding() -> None:
    """Each drafted token is a row that ends with it: the rows of the plain step, and nothing synchronises."""
    model = Model(128, 64, "cuda", torch.bfloat16)
    runner = lz.StepRunner(model.forward, model.cache, max_model_len=64, max_num_seqs=8)
    sequences = opened(model.cache, [3, 9])
    for turn in range(3):
        ranges = [sequence.extend(5) for sequence in sequences]
        ids = torch.arange(10, device="cuda") * 7 % 50
        metadata = replace(model.cache.attention_metadata(ranges), logits_indices=slice(None))
        expected = model.forward(metadata, ids)
        verify = runner.all_positions
        rows = unsynchronised(verify, ranges, ids) if turn else verify(ranges, ids)
        torch.testing.assert_close(rows, expected, rtol=2e-2, atol=2e-2)
    assert runner.captures == 2  # eight rows and two


@pytest.mark.usefixtures("runtime")
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_model_is_captured_on_its_own_device_whatever_the_threads_is() -> None:
    """A second GPU's graph, captured and replayed by a thread whose device is the first."""
    model = Model(128, 64, "cuda:1", torch.bfloat16)
    runner = lz.StepRunner(model.forward, model.cache, max_model_len=64, max_num_seqs=4)
    (sequence,) = opened(model.cache, [5])
    for turn in range(3):
        ranges, ids = [sequence.extend(1)], torch.tensor([turn], device="cuda:1")
        with torch.cuda.device("cuda:1"):
            expected = model.plain(ranges, ids)
        assert torch.cuda.current_device() == 0
        torch.testing.assert_close(runner(ranges, ids), expected, rtol=2e-2, atol=2e-2)


@pytest.mark.usefixtures("runtime")
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_a_hundred_captured_steps_never_wait_for_the_device() -> None:
    """Steps that take their ids from the step before, as decoding does: nothing between them synchronises."""
    model = Model(128, 128, "cuda", torch.bfloat16)
    widest = -(-120 // model.cache.page_size)  # one graph for every step
    runner = lz.StepRunner(
        model.forward, model.cache, max_model_len=120, max_num_seqs=4, table_widths=(widest,)
    )
    sequences = opened(model.cache, [3, 9, 0, 5])
    ids = torch.arange(4, device="cuda")

    def step() -> None:
        nonlocal ids
        ids = runner([sequence.extend(1) for sequence in sequences], ids).argmax(-1) % 50

    for _ in range(3):  # captured, and what torch prepares on first use
        step()
    torch.cuda.synchronize()
    captures = runner.captures
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(100):
            step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert runner.captures == captures and [sequence.length for sequence in sequences] == [106, 112, 103, 108]


@pytest.mark.usefixtures("runtime")
def test_every_width_of_tables_replays_the_plain_step() -> None:
    """A sequence grows through three widths, beside a short one; graphs that were let go come back right."""
    model = Model(256, 64, "cuda", torch.bfloat16)
    runner = lz.StepRunner(
        model.forward, model.cache, max_model_len=60, max_num_seqs=2, table_widths=(2, 6), max_graphs=2
    )
    short, long = opened(model.cache, [2, 5])
    for turn in range(54):
        ranges = [long.extend(1)] if turn % 3 else [short.extend(1), long.extend(1)]
        ids = torch.arange(len(ranges), device="cuda") + turn % 40
        expected = model.plain(ranges, ids)
        torch.testing.assert_close(runner(ranges, ids), expected, rtol=2e-2, atol=2e-2)
    assert runner.kept == 2 and runner.captures == 2 * 3 and runner.evictions == 4


@pytest.mark.usefixtures("runtime")
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_a_step_with_prompts_replays_what_the_plain_step_gives() -> None:
    """Prompts beside rows that decode, in buckets with and without padding; nothing synchronises."""
    model = Model(256, 64, "cuda", torch.bfloat16)
    runner = lz.StepRunner(
        model.forward, model.cache, max_model_len=200, max_num_seqs=4, buckets=(4,), prefill_buckets=(8, 64)
    )
    sequences = opened(model.cache, [3, 9, 0, 5])
    for turn, counts in enumerate([(1, 1, 5, 1), (1, 30, 1, 2), (3, 1, 2, 1), (1, 1, 20, 1), (1, 1, 1, 5)]):
        ranges = [sequence.extend(count) for sequence, count in zip(sequences, counts, strict=True)]
        ids = torch.arange(sum(counts), device="cuda") * 7 % 50
        expected = model.plain(ranges, ids)
        rows = unsynchronised(runner, ranges, ids) if turn > 2 else runner(ranges, ids)
        torch.testing.assert_close(rows, expected, rtol=2e-2, atol=2e-2)
    assert runner.captures == 2 and runner.prefill_buckets == (8, 64)
