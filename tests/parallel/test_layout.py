"""A layout and a pipeline of one rank, and what they refuse."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import anyio
import pytest
import pytest_asyncio
import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]  # public, not declared

import layerzero as lz
from layerzero import parallel
from layerzero.parallel import layout as layout_module
from layerzero.parallel import pipeline as pipeline_module


@pytest_asyncio.fixture
async def member() -> AsyncIterator[Any]:
    """The one rank of a rank group."""
    async with (
        lz.start(lz.Settings(device="cpu"), scoped=True),
        lz.rank_group(1, rank=0, store=HashStore(), epoch=0) as joined,
    ):
        yield joined


def test_sizes_that_are_not_the_groups_are_refused() -> None:
    """By name, before anything is made."""
    member: Any = type("Member", (), {"ranks": 6, "rank": 0})()
    for tp, pp in ((2, 2), (0, 6), (6, -1)):
        with pytest.raises(ValueError, match=rf"tp \* pp needs to be .* 6 ranks, got {tp} \* {pp}"):
            parallel.Layout(member, tp=tp, pp=pp)
    member.need_same = lambda values: None
    with pytest.raises(lz.ConfigurationError, match=r"default group of torch\.distributed with the 6"):
        parallel.Layout(member, tp=2, pp=3)


def test_a_sum_over_ranks_refuses_what_wants_a_gradient() -> None:
    """No gradient is lost without a word."""
    group = parallel.TensorGroup(0, 2)
    for call in (group.reduce, group.gather_columns):
        with pytest.raises(RuntimeError, match="needs tensors without a gradient"):
            call(torch.ones(2, 2, requires_grad=True))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.ones(2, 3, 4)}, r"x needs shape \(N, C\), got \(2, 3, 4\)"),
        ({"scores": torch.ones(3, 2)}, r"scores needs shape \(2, T\), for x's rows, got \(3, 2\)"),
        ({"w_down": torch.ones(1, 4, 6)}, "w_up and w_down need as many experts"),
    ],
)
def test_arguments_of_experts_that_do_not_fit_are_refused(change: dict[str, Any], message: str) -> None:
    """By name, on the rank that has them."""
    given: dict[str, Any] = {
        "x": torch.ones(2, 4), "experts": torch.zeros(2, 2, dtype=torch.int32), "scores": torch.ones(2, 2),
        "w_up": torch.ones(2, 12, 4), "w_down": torch.ones(2, 4, 6),
    } | change  # fmt: skip
    with pytest.raises(ValueError, match=message):
        parallel.expert_parallel_moe(parallel.TensorGroup(), **given)


@pytest.mark.asyncio
async def test_one_stage_is_a_function_of_the_group(member: Any) -> None:
    """Callers get their rows, `finish` has run on them, and an error of it is theirs."""
    layout = parallel.Layout(member)
    pipeline = parallel.Pipeline(layout)

    def finish(results: torch.Tensor, rows: torch.Tensor, words: list[str]) -> torch.Tensor:
        if "bad" in words:
            raise ValueError("a bad word")
        return results + len(words)

    step = pipeline.batched(
        lambda x, rows, words, counts: rows * sum(counts),
        name="step",
        carries=lambda rows: torch.empty(rows, 2),
        returns=lambda rows, words: rows,
        finish=finish,
    )
    assert torch.equal(await step(1, torch.ones(3, 2), "good"), torch.full((3, 2), 4.0))
    assert pipeline.stats.steps == 1 and pipeline.stats.sent_bytes == 0
    with pytest.raises(ValueError, match="a bad word"):
        await step(2, torch.ones(1, 2), "bad")
    with pytest.raises(lz.ConfigurationError, match="batches needs at least 1"):
        parallel.Pipeline(layout, batches=-1)


class OtherStage:
    """The second of two stages, in this process: it adds 1 to what it is sent, and may stop."""

    def __init__(self) -> None:
        self.sent: list[torch.Tensor] = []
        self.hangs = False

    def isend(self, tensor: torch.Tensor, **to: Any) -> Any:
        """Take a tensor at once."""
        self.sent.append(tensor)
        return SimpleNamespace(wait=lambda: None)

    def irecv(self, out: torch.Tensor, **source: Any) -> Any:
        """Give back what was sent first, to who waits."""

        def wait() -> None:
            if self.hangs:
                raise RuntimeError("timed out waiting for 20000ms for recv operation to complete")
            out.copy_(self.sent.pop(0) + 1)

        return SimpleNamespace(wait=wait)


def two_stages(member: Any, device: str = "cpu") -> Any:
    """The first of two stages of one rank each, as a pipeline's step; the second is an `OtherStage`."""
    layout: Any = SimpleNamespace(
        member=member, stages=2, stage=0, first=True, last=False, chain=None, returning=None,
        tensor=parallel.TensorGroup(),
    )  # fmt: skip
    return parallel.Pipeline(layout).batched(
        lambda x, rows: rows * 2,
        name="step",
        carries=lambda rows: torch.empty(rows, 2),
        returns=lambda rows: torch.empty_like(rows, device=device),
    )


def test_results_come_back_in_a_group_of_the_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the default group computes with: a receive on rank 0's GPU would wait where steps compute.

    It has every rank: torch splits a default group of NCCL for any group that leaves a rank out.
    """
    made: list[tuple[list[int] | None, str | None]] = []

    def new_group(ranks: list[int] | None = None, backend: str | None = None) -> str:
        made.append((ranks, backend))
        return "group"

    monkeypatch.setattr(layout_module, "_is_default_group", lambda member: True)
    monkeypatch.setattr(layout_module, "dist", SimpleNamespace(new_group=new_group))
    member: Any = SimpleNamespace(ranks=4, rank=0, need_same=lambda values: None)
    parallel.Layout(member, tp=2, pp=2)
    assert made == [([0, 1], None), ([2, 3], None), ([0, 2], None), ([1, 3], None), (None, "gloo")]


@pytest.mark.asyncio
async def test_results_are_received_on_the_host(member: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """And go to the device of what `returns` makes."""
    stage, places = OtherStage(), []

    def irecv(out: torch.Tensor, **source: Any) -> Any:
        places.append(out.device.type)
        return SimpleNamespace(wait=lambda: None)

    monkeypatch.setattr(stage, "irecv", irecv)
    monkeypatch.setattr(pipeline_module, "dist", stage)
    step = two_stages(member, "meta")
    assert (await step(1, torch.ones(1, 2))).device.type == "meta"
    assert places == ["cpu"]


@pytest.mark.asyncio
async def test_a_group_that_fails_answers_who_waits(member: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A dead stage in the middle leaves the last one, and rank 0 behind it, waiting: callers do not."""
    stage, released = OtherStage(), threading.Event()
    monkeypatch.setattr(pipeline_module, "dist", stage)
    receive = SimpleNamespace(wait=lambda: released.wait(60))
    monkeypatch.setattr(stage, "irecv", lambda out, **source: receive)
    try:
        waiting = asyncio.ensure_future(two_stages(member)(1, torch.ones(1, 2)))
        while not stage.sent:  # noqa: ASYNC110  it is sent on a worker's thread
            await asyncio.sleep(0.001)
        member.group.fail("rank 1 is gone")
        with pytest.raises(lz.DeviceLostError, match="in its stages: rank 1 is gone"):
            await asyncio.wait_for(waiting, 30)
        assert not released.is_set()
    finally:
        released.set()


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_results_that_do_not_come_end_the_group(monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    """After a step without an answer the next answer would be another step's: nothing is run any more."""
    stage = OtherStage()
    monkeypatch.setattr(pipeline_module, "dist", stage)

    async def main() -> None:
        async with (
            lz.start(lz.Settings(device="cpu"), scoped=True),
            lz.rank_group(1, rank=0, store=HashStore(), epoch=0) as member,
        ):
            step = two_stages(member)
            assert (await step(1, torch.full((2, 2), 3.0))).tolist() == [[7.0, 7.0]] * 2
            stage.hangs = True
            with pytest.raises(lz.DeviceLostError, match="the last stage gave nothing of step: timed out"):
                await step(2, torch.ones(1, 2))
            stage.hangs = False
            with pytest.raises(lz.DeviceLostError):
                await step(3, torch.ones(1, 2))
            assert member.failure is not None and len(stage.sent) == 1

    anyio.run(main, backend=backend)
