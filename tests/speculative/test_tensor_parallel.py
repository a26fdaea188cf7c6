"""A target that ranks share: every rank verifies, alike, and is caught where it would accept otherwise."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import HashStore  # type: ignore[attr-defined]  # public, not declared

import layerzero as lz
from layerzero import sync
from layerzero.actors.group.join import RankHandle
from layerzero.kvcache import PageAllocator, PagesExhaustedError
from layerzero.spec.errors import ConsistencyError, DeviceLostError
from layerzero.speculative import generation as speculative
from layerzero.speculative import tensor_parallel as coordinated
from tests.speculative.test_generation import WORDS, Chain

TEXTS = 5
PAGE, PAGES = 4, 80


class Paged:
    """A rank's cache of one sequence: a chain's tokens, and pages for all it may hold."""

    def __init__(self, pages: PageAllocator, limit: int) -> None:
        self.pages, self.held = pages, pages.allocate(-(-limit // PAGE))
        self.chain = Chain(1)

    @property
    def length(self) -> int:
        return self.chain.length

    @length.setter
    def length(self, value: int) -> None:
        self.chain.rollback(value)


class Shared:
    """One rank of a target, whose ranks spread rows through a box of this process."""

    box: Tensor

    def __init__(self, member: RankHandle, meeting: threading.Barrier, **options: Any) -> None:
        self.member, self.meeting = member, meeting
        self.pages = PageAllocator(PAGES)
        self.texts: dict[int, list[int]] = {}
        self.most = 0
        self.target = coordinated.TensorParallelTarget(
            member,
            open=lambda limit: Paged(self.pages, limit),
            close=lambda cache: self.pages.free(cache.held),
            forward=self.forward,
            broadcast=self.spread,
            vocab_size=WORDS,
            on_tokens=lambda number, tokens: self.texts.setdefault(number, []).extend(tokens),
            **options,
        )

    def forward(self, caches: Any, ids: Tensor, counts: Any) -> Tensor:
        self.most = max(self.most, len(caches))
        seen = []
        for cache, own in zip(caches, ids.split(list(counts)), strict=True):
            chain = cache.chain
            for token in own.tolist():
                chain.tokens.append(token)
                seen.append(chain.logits(chain.tokens[-2] if chain.length > 1 else 0, token))
        return sync.linear(torch.stack(seen), torch.eye(WORDS))

    def spread(self, rows: Tensor) -> None:
        if self.member.rank == 0:
            Shared.box = rows.clone()
        self.meeting.wait(90)
        rows.copy_(Shared.box)
        self.meeting.wait(90)


def rank_group(ranks: int, lead: Any, follow: Any = None) -> tuple[list[Shared], list[BaseException | None]]:
    """Rank 0 runs `lead`, the others follow; each in a thread with a runtime of its own."""
    store, meeting = HashStore(), threading.Barrier(ranks)
    seen: list[Any] = [None] * ranks
    errors: list[BaseException | None] = [None] * ranks

    async def main(rank: int) -> None:
        settings = lz.Settings(inference=True, perfdb=None)
        async with (
            lz.start(settings, scoped=True),
            lz.rank_group(ranks, rank=rank, store=store, epoch=0, timeout_s=90.0) as member,
        ):
            seen[rank] = own = Shared(member, meeting)
            if rank:
                if follow is not None:
                    follow(own)
                await member.follow()
            else:
                await lead(own)

    def run(rank: int) -> None:
        try:
            asyncio.run(main(rank))
        except BaseException as error:
            errors[rank] = error
            meeting.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not any(thread.is_alive() for thread in threads)
    return seen, errors


OPTIONS: list[dict[str, Any]] = [
    {"overlap": False}, {"overlap": True}, {"temperature": 0.0}, {"top_k": 2, "top_p": 0.9},
]  # fmt: skip


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("blend", [0.0, 0.9, 1.0])
def test_every_rank_accepts_what_one_process_accepts(blend: float, options: dict[str, Any]) -> None:
    """Several texts at once, from bad drafts to perfect ones: the same on three ranks, and without a rank
    group."""
    found: dict[int, list[int]] = {}
    numbers: dict[int, int] = {}

    async def one(own: Shared, seed: int) -> None:
        async with own.target.sequence(64) as sequence:
            draft = Chain(2, blend, Chain(1))
            text = speculative.generate(
                draft, sequence, [0, 1], num_speculative_tokens=3, max_tokens=17, seed=seed, **options
            )
            found[seed] = [token async for token in text]
            numbers[seed] = sequence.number

    async def lead(own: Shared) -> None:
        await asyncio.gather(*(one(own, seed) for seed in range(TEXTS)))

    async def alone(seed: int) -> list[int]:
        text = speculative.generate(
            Chain(2, blend, Chain(1)),
            Chain(1),
            [0, 1],
            num_speculative_tokens=3,
            max_tokens=17,
            seed=seed,
            **options,
        )
        return [token async for token in text]

    seen, errors = rank_group(3, lead)
    assert errors == [None] * 3
    for seed in range(TEXTS):
        assert found[seed] == asyncio.run(alone(seed))
        assert seen[1].texts[numbers[seed]][:17] == found[seed], "a follower knows the text"
    assert seen[0].texts == seen[1].texts == seen[2].texts and len(seen[1].texts) == TEXTS
    assert seen[1].most > 1, "texts under way at once verify in one step"
    assert [own.target.open_sequences for own in seen] == [0] * 3
    assert [own.pages.free_pages for own in seen] == [PAGES] * 3


def test_a_rank_that_would_accept_otherwise_fails_before_its_next_collective() -> None:
    """Another verdict on one rank, as another seed would give, is named with both lengths."""

    async def lead(own: Shared) -> None:
        async with own.target.sequence(64) as sequence:
            text = speculative.generate(
                Chain(2), sequence, [0, 1], num_speculative_tokens=3, max_tokens=40, seed=0
            )
            with pytest.raises((DeviceLostError, threading.BrokenBarrierError)):
                async for _ in text:
                    pass

    def deviate(own: Shared) -> None:
        verdict = own.target._verdict

        def other(*args: Any) -> Any:
            found = verdict(*args)
            args[2].resume_length += 1
            return found

        own.target._verdict = other  # type: ignore[assignment,method-assign]

    seen, errors = rank_group(2, lead, deviate)
    assert isinstance(errors[1], ConsistencyError), errors
    assert "it accepted other drafts" in str(errors[1]) and "on rank 1, got" in str(errors[1])
    assert len(seen[1].texts[0]) >= 1
    seen[1].target.close()
    assert [own.pages.free_pages for own in seen] == [PAGES] * 2


def test_draft_and_target_choose_apart_under_one_plan() -> None:
    """The draft runs on rank 0 alone, in a model of its own: neither model's choices are the other's."""
    digests: list[tuple[str, str]] = []

    class Drafting(Chain):
        def __init__(self, member: RankHandle) -> None:
            super().__init__(2)
            self.member = member

        async def forward(self, tokens: Tensor) -> Tensor:
            with self.member.using_model("draft"):
                return sync.rms_norm(await super().forward(tokens))

    async def lead(own: Shared) -> None:
        group_of = own.member.group
        async with own.target.sequence(64) as sequence:
            text = speculative.generate(
                Drafting(own.member), sequence, [0, 1], num_speculative_tokens=2, max_tokens=9, seed=0
            )
            async for _ in text:
                digests.append((group_of.selections_digest("draft"), group_of.selections_digest("target")))
        assert set(group_of.state_for("draft").tables) == {"rms_norm"}
        assert "rms_norm" not in group_of.state_for("target").tables
        assert {"linear", "verify_chain"} <= set(group_of.state_for("target").tables)
        assert own.member.agreed_plan.version == 1

    seen, errors = rank_group(2, lead)
    assert errors == [None, None]
    assert seen[1].member.group.selections_digest("draft") == ""
    assert digests[-1][1] == seen[1].member.group.selections_digest("target") != ""


def test_what_a_shared_target_cannot_do_is_said() -> None:
    """Another vocabulary and a full pool cost their caller alone; distributions do not come to rank 0."""

    async def lead(own: Shared) -> None:
        async with own.target.sequence(64) as sequence:
            drafting: Any = sequence
            with pytest.raises(TypeError, match="draft needs `forward`, which gives logits, got SharedSeq"):
                speculative.generate(drafting, sequence, [0])
            odd = speculative.DraftBatch(
                torch.tensor([0]),
                torch.tensor([1]),
                torch.ones(1, 5),
                False,
                speculative.SamplingParams(0, 0, 1.0, 0, 1.0),
            )
            with pytest.raises(ValueError, match="draft needs the target's vocabulary of 3 tokens, got 5"):
                await sequence.verify(odd)
            with pytest.raises(PagesExhaustedError):
                async with own.target.sequence(PAGES * PAGE):
                    raise AssertionError("there are not so many pages")
        async with own.target.sequence(64):
            assert own.target.open_sequences == 1  # and no round: no other rank hears of it

    assert rank_group(2, lead)[1] == [None, None]
