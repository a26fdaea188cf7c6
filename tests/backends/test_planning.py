"""FlashInfer's plans under graph capture: made before it they serve in it, and nobody plans them again."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from layerzero.backends.flashinfer.planning import MAX_PLANS, PlanKey, StreamWorkspaces
from layerzero.measure.timing import QUICK, time_kernels
from layerzero.ops import table
from layerzero.ops.captures import passing_captures
from layerzero.spec.errors import CudaGraphUnsafeError
from tests.backends.test_vendors import BY_ID, loaded, near, paged_call, rand


class Event:
    """A CUDA event where there is no CUDA."""

    def record(self) -> None: ...

    def synchronize(self) -> None: ...


class Card:
    """A stage whose wrappers count their plans, on a stream that captures when told."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.capturing = False
        self.stage = StreamWorkspaces(torch.zeros(1))
        self.planned: list[list[str]] = []
        patch.setattr(torch.cuda, "Event", Event)
        patch.setattr(torch.cuda, "is_initialized", lambda: True)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.capturing)

    def call(self, name: str, lengths: PlanKey) -> Any:
        """The wrapper that served a call: what it was planned for, in order."""
        return self.stage.run("ragged", lengths, lambda _: [], lambda w: w.append(name), lambda w: w)


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Card:
    return Card(monkeypatch)


def known(name: str) -> PlanKey:
    return PlanKey(name, (name,))


def test_a_plan_made_before_a_capture_is_used_in_it(card: Card) -> None:
    """Nothing is planned while the stream captures."""
    before = card.call("a", known("a"))
    card.capturing = True
    assert card.call("a", known("a")) is before
    assert before == ["a"]


@pytest.mark.parametrize("lengths", [known("b"), PlanKey(object())], ids=["unseen", "bare"])
def test_a_capture_without_a_plan_is_refused(card: Card, lengths: PlanKey) -> None:
    """Planning would copy from the host inside the graph; the plans that stand are left alone."""
    before = card.call("a", known("a"))
    bare = card.call("bare", PlanKey(object()))
    card.capturing = True
    with pytest.raises(CudaGraphUnsafeError, match="made before the capture"):
        card.call("b", lengths)
    assert (before, bare) == (["a"], ["bare"])
    card.capturing = False
    assert card.call("a", known("a")) is before


def test_the_plan_of_a_graph_is_not_planned_again(card: Card) -> None:
    """A replay reads its buffers: later calls of other lengths take other wrappers, however many they are."""
    graphs = card.call("graph", known("graph"))
    card.capturing = True
    card.call("graph", known("graph"))
    card.capturing = False
    others = [card.call(str(n), known(str(n))) for n in range(2 * MAX_PLANS)]
    assert graphs == ["graph"]
    assert len({id(wrapper) for wrapper in others}) == MAX_PLANS
    assert card.call("graph", known("graph")) is graphs


def test_a_capture_that_passes_keeps_no_wrapper(card: Card) -> None:
    """Measuring hundreds of shapes holds no more wrappers than calling them does."""
    made = []
    for n in range(3 * MAX_PLANS):
        made.append(card.call(str(n), known(str(n))))
        card.capturing = True
        with passing_captures():
            assert card.call(str(n), known(str(n))) is made[-1]
        card.capturing = False
    assert len({id(wrapper) for wrapper in made}) == MAX_PLANS


@pytest.mark.gpu
def test_dense_attention_is_timed_as_a_graph_and_bare_pages_say_why_not() -> None:
    """A dense call's lengths are its shape, so its plan stands; a bare tensor's are read at every call."""
    dense = loaded(BY_ID["flashinfer.attention.fa2"])
    args = table.get("attention").build(*(rand(2, 64, 4, 64) for _ in range(3)), layout="BSHD")[1]
    device = torch.device("cuda:0")
    timings, failed = time_kernels({"dense": dense}, [args, args], device, "graph", QUICK)
    assert failed == {} and timings["dense"].median_us > 0
    paged = loaded(BY_ID["flashinfer.paged_attention.fa2"])
    pages = paged_call(BY_ID["flashinfer.paged_attention.fa2"], [5, 33])
    timings, failed = time_kernels({"paged": paged, "dense": paged}, [pages], device, "graph", QUICK)
    assert timings == {} and all("CudaGraphUnsafeError" in why for why in failed.values())
    assert not near("attention", args, dense(*args))


@pytest.mark.gpu
def test_a_graph_of_a_plan_follows_its_operands() -> None:
    """Replayed over other numbers, after calls of other shapes, it gives what a call gives."""
    run = loaded(BY_ID["flashinfer.attention.fa2"])
    build = table.get("attention").build
    args = build(*(rand(2, 64, 4, 64) for _ in range(3)), layout="BSHD", is_causal=True)[1]
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        run(*args)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        out = run(*args)
    with torch.cuda.stream(stream):
        for rows in range(1, MAX_PLANS + 3):
            run(*build(*(rand(2, rows, 4, 64) for _ in range(3)), layout="BSHD")[1])
    args[0].copy_(args[0].flip(1))
    torch.cuda.synchronize()
    graph.replay()
    torch.cuda.synchronize()
    assert not near("attention", args, out)
