"""`lz.rank_group` in threads of one process: awaited functions of rank 0 run on every rank, in one order."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import msgspec
import pytest
import torch
from torch import Tensor
from torch.distributed import HashStore  # type: ignore[attr-defined]  # public, not declared

import layerzero as lz
from layerzero.actors.group.join import JoinContext, RankHandle
from layerzero.actors.group.rank_group import RankGroup
from layerzero.actors.remote.stores import TorchStore
from layerzero.calls.blocking import context_runtime
from layerzero.scheduler.loop_drivers import LoopDrivers
from layerzero.spec.errors import ConfigurationError, ConsistencyError, DeviceLostError
from tests.kernels import kernel


class Rank:
    """What one rank of a test saw: the batches that its function ran, and what stood in them."""

    def __init__(self) -> None:
        self.batches: list[tuple[list[float], list[str]]] = []
        self.kernels: list[str] = []

    def step(self, x: Tensor, tags: list[str]) -> Tensor:
        out: Tensor = lz.sync.rms_norm(x)
        last = lz.last_selection()
        self.kernels.append(last.kernel if last is not None else "")
        self.batches.append((x[:, 0].tolist(), tags))
        return out


Body = Callable[[RankHandle, Rank], Awaitable[Any]]


def rank_group(bodies: list[Body], **options: Any) -> tuple[list[Rank], list[BaseException | None]]:
    """Run each body as one rank, in a thread with a loop and a runtime of its own."""
    store, seen = HashStore(), [Rank() for _ in bodies]
    errors: list[BaseException | None] = [None] * len(bodies)

    async def main(index: int) -> None:
        async with (
            lz.start(scoped=True),
            lz.rank_group(len(bodies), rank=index, store=store, epoch=0, timeout_s=10.0, **options) as member,
        ):
            await bodies[index](member, seen[index])

    def run(index: int) -> None:
        try:
            asyncio.run(main(index))
        except BaseException as error:
            errors[index] = error

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(bodies))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    return seen, errors


def rows(value: float) -> Tensor:
    return torch.full((1, 8), value)


async def lead(member: RankHandle, seen: Rank) -> None:
    """Sixteen requests at once, three steps each."""
    step = member.batched(seen.step, name="step")

    async def request(number: int) -> None:
        for _ in range(3):
            out = await step(f"r{number}", rows(float(number + 1)), f"tag{number}")
            assert torch.allclose(out, torch.ones(1, 8), atol=1e-4)

    await asyncio.gather(*map(request, range(16)))


async def obey(member: RankHandle, seen: Rank) -> None:
    member.batched(seen.step, name="step")
    await member.follow()


def test_callers_spread_over_batches_of_their_own() -> None:
    """Of four callers at once two are in each of two batches, which never join; every rank knows both."""

    async def leads(member: RankHandle, seen: Rank) -> None:
        with pytest.raises(ValueError, match="batches needs"):
            member.batched(seen.step, name="none", batches=0)
        step = member.batched(seen.step, name="step", batches=2)
        await asyncio.gather(*(step(number, rows(1.0), f"tag{number}") for number in range(4)))

    async def follows(member: RankHandle, seen: Rank) -> None:
        member.batched(seen.step, name="step", batches=2)
        await member.follow()

    seen, errors = rank_group([leads, follows])
    assert errors == [None] * 2
    assert seen[0].batches == seen[1].batches
    assert sorted(tags for _, tags in seen[0].batches) == [["tag0", "tag2"], ["tag1", "tag3"]]


def test_followers_run_what_rank_0_batches_in_its_order() -> None:
    """Requests, order, arguments and kernels are the same on three ranks; only rank 0 has coroutines."""
    seen, errors = rank_group([lead, obey, obey])
    assert errors == [None] * 3
    assert seen[0].batches == seen[1].batches == seen[2].batches
    assert seen[0].kernels == seen[1].kernels == seen[2].kernels
    assert max(len(tags) for _, tags in seen[0].batches) > 1
    assert sum(len(tags) for _, tags in seen[0].batches) == 48


def test_a_captured_step_is_captured_anew_for_a_plan_and_never_for_one_rank_alone() -> None:
    """A capture runs the collectives too: a rank that captures while the others replay would hang."""
    steps: dict[int, list[int]] = {0: [], 1: []}

    def shared(member: RankHandle) -> Callable[..., Awaitable[Any]]:
        graph: Any = lz.compile(lambda x: lz.sync.rms_norm(x), buckets=(1,))

        def step(x: Tensor) -> Tensor:
            out: Tensor = graph(x)
            steps[member.rank].append(graph.captures)
            if member.rank == 1:
                context_runtime().device().refresh()  # a breaker, say, that opens on this rank
            return out

        return member.batched(step, name="step")

    async def leads(member: RankHandle, seen: Rank) -> None:
        step = shared(member)
        for _ in range(3):
            await step("r", rows(1.0))
        await member.propose(msgspec.structs.replace(member.agreed_plan, version=2, activate_at=1))
        await step("r", rows(1.0))

    async def follows(member: RankHandle, seen: Rank) -> None:
        shared(member)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(member.agree, 2)
            await member.follow()

    _, errors = rank_group([leads, follows])
    assert errors == [None, None]
    assert steps == {0: [1, 1, 1, 2], 1: [1, 1, 1, 2]}


def test_a_rank_that_batches_otherwise_fails_the_gang() -> None:
    """Both ranks form batches themselves; one takes the rows the other way round and is caught."""

    def comparing(order: list[int]) -> Body:
        async def body(member: RankHandle, seen: Rank) -> None:
            step = member.batched(seen.step, name="step", send=False)
            await asyncio.gather(*(step(f"r{n}", rows(float(n + 1)), "") for n in order))

        return body

    seen, errors = rank_group([comparing([0, 1]), comparing([1, 0])])
    assert isinstance(errors[1], ConsistencyError), errors
    assert "requests of rank 0's step 1 needs ['r0', 'r1'], got ['r1', 'r0'] on rank 1" in str(errors[1])
    assert seen[1].batches == []  # it raised before it ran anything
    seen, errors = rank_group([comparing([0, 1]), comparing([0, 1])])
    assert errors == [None, None]
    assert seen[0].batches == seen[1].batches


def test_a_function_that_raises_on_a_follower_ends_the_gang_for_all() -> None:
    """Rank 0's next step is refused with the follower's reason."""

    async def leads(member: RankHandle, seen: Rank) -> None:
        step = member.batched(seen.step, name="step")
        with pytest.raises(
            DeviceLostError, match="rank 1 cannot follow: step raised RuntimeError: broken shard"
        ):
            for _ in range(10_000):
                await step("r", rows(1.0), "")
                await asyncio.sleep(0.001)

    async def breaks(member: RankHandle, seen: Rank) -> None:
        def step(x: Tensor, tags: list[str]) -> Tensor:
            raise RuntimeError("broken shard")

        member.batched(step, name="step")
        await member.follow()

    _, errors = rank_group([leads, breaks])
    assert errors[0] is None
    assert isinstance(errors[1], RuntimeError)


def test_what_is_read_from_a_failed_groups_device_fails_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before `on_failure` breaks a collective, whose sums are none then; until the group is left."""
    seen: list[Any] = []
    monkeypatch.setattr(LoopDrivers, "lose_reads", lambda drivers, error: seen.append(error))

    async def leads(member: RankHandle, seen_: Rank) -> None:
        member.group.fail("a rank is gone")
        assert [str(each) for each in seen] == ["the rank group failed: a rank is gone", "a rank is gone"]
        assert isinstance(seen[0], DeviceLostError) and seen[0].retryable is False

    rank_group([leads], on_failure=seen.append)
    assert len(seen) == 3 and seen[2] is None
    seen.clear()

    async def leaves(member: RankHandle, seen_: Rank) -> None:
        """Leave the rank group at once."""

    rank_group([leaves], on_failure=seen.append)
    assert seen == []


def test_a_function_that_a_follower_lacks_is_named() -> None:
    """The follower says which it has."""

    async def other(member: RankHandle, seen: Rank) -> None:
        member.batched(seen.step, name="decode")
        await member.follow()

    async def leads(member: RankHandle, seen: Rank) -> None:
        step = member.batched(seen.step, name="prefill")
        await step("r", rows(1.0), "")

    _, errors = rank_group([leads, other])
    assert isinstance(errors[1], ConsistencyError)
    assert "needs the function 'prefill' that rank 0 runs, got decode" in str(errors[1])


def test_a_block_s_policy_in_a_step_holds_among_the_kernels_agreed_on() -> None:
    """Every rank follows it alike, choices are compared, and a kernel that was not agreed on stays out."""

    def step(x: Tensor, seen: Rank) -> Tensor:
        with lz.prefer("reference", op="rms_*"), lz.disable("no.such"):
            out: Tensor = lz.sync.rms_norm(x)
            last = lz.last_selection()
            seen.kernels.append(last.kernel if last is not None else "")
        return out

    def own_kernel(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
        return x * 0

    def body(lead: bool, alike: bool = True) -> Body:
        async def run(member: RankHandle, seen: Rank) -> None:
            runtime = context_runtime()
            runtime.add_kernel(kernel(f"reference.rms_norm.of_{int(lead)}", own_kernel, launch_us=0.0))

            def named(x: Tensor) -> Tensor:
                return step(x, seen) if alike or lead else lz.sync.rms_norm(x)

            awaited = member.batched(named, name="step")
            if lead:
                for _ in range(2):
                    await awaited("r", rows(1.0))
            else:
                await member.follow()

        return run

    ranks, errors = rank_group([body(True), body(False)])
    assert errors == [None, None]
    assert ranks[0].kernels == ranks[1].kernels == ["reference.rms_norm"] * 2
    _, errors = rank_group([body(True), body(False, alike=False)])
    assert any(isinstance(error, ConsistencyError) for error in errors)


def test_a_block_s_policy_around_a_step_is_refused() -> None:
    """Rank 0's alone: no other rank would follow it."""

    async def leads(member: RankHandle, seen: Rank) -> None:
        awaited = member.batched(seen.step, name="step")
        with (
            pytest.raises(ConfigurationError, match="needs the policy of a block inside the function"),
            lz.prefer("reference", op="rms_norm"),
        ):
            await awaited("r", rows(1.0), "")
        await awaited("r", rows(1.0), "")

    _, errors = rank_group([leads])
    assert errors == [None]


def test_what_one_rank_alone_would_do_is_refused() -> None:
    """`backend=` inside a step, a name twice, following on rank 0."""

    async def leads(member: RankHandle, seen: Rank) -> None:
        def step(x: Tensor) -> Tensor:
            return lz.sync.rms_norm(x, backend="reference.rms_norm")

        awaited = member.batched(step, name="step")
        with pytest.raises(ConfigurationError, match="backend needs None inside a rank group's step"):
            await awaited("r", rows(1.0))
        with pytest.raises(ConfigurationError, match="name needs to be new"):
            member.batched(step, name="step")
        with pytest.raises(ConfigurationError, match="rank 0: it decides"):
            await member.follow()

    _, errors = rank_group([leads])
    assert errors == [None]


def test_rank_and_store_come_from_torchrun_or_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outside torchrun the error names argument and variable."""
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    with lz.start(scoped=True):
        with pytest.raises(ConfigurationError, match="rank needs a number, or the variable RANK"):
            lz.rank_group(2, store=HashStore())
        with pytest.raises(ConfigurationError, match=r"init_process_group\(\) before, got None"):
            lz.rank_group(2, rank=0)
        monkeypatch.setenv("RANK", "0")
        with pytest.raises(ConfigurationError, match="ranks needs a number, or the variable WORLD_SIZE"):
            lz.rank_group(store=HashStore())


def test_a_bad_argument_or_a_request_twice_costs_only_its_caller() -> None:
    """What can be seen before a step message exists reaches no neighbour of the batch."""

    async def leads(member: RankHandle, seen: Rank) -> None:
        step = member.batched(seen.step, name="step")
        calls = [
            step("a", rows(1.0), "x"),
            step("b", rows(1.0), object()),
            step("c", rows(1.0).to(torch.complex64), "x"),
            step("a", rows(1.0), "x"),
            step(rows(1.0), "x"),
            step(1 << 64, rows(1.0), "x"),
            step("d", rows(1.0), "\ud800"),
        ]
        found: list[Any] = await asyncio.gather(*calls, return_exceptions=True)
        good, odd, wide, again, unnamed, large, half = found
        assert isinstance(good, Tensor)
        assert isinstance(odd, TypeError) and "got object" in str(odd)
        assert isinstance(wide, TypeError) and "complex64" in str(wide)
        assert isinstance(again, ValueError) and "'a' again" in str(again)
        assert isinstance(unnamed, TypeError) and str(unnamed) == "request needs an int or a str, got Tensor"
        assert isinstance(large, ValueError) and str(large).startswith("request needs integers of 64 bits")
        assert isinstance(half, ValueError) and str(half).startswith(
            "step needs integers of 64 bits and texts"
        )
        assert isinstance(await step("a", rows(1.0), "x"), Tensor)

    seen, errors = rank_group([leads, obey])
    assert errors == [None, None]
    assert seen[0].batches == seen[1].batches and len(seen[0].batches) == 2


def test_arguments_lie_alike_on_every_rank() -> None:
    """Rows that rank 0 took out of a larger tensor start and step as those that followers unpack."""

    def lying(seen: Rank) -> Callable[[Tensor], Tensor]:
        def step(x: Tensor) -> Tensor:
            seen.batches.append(([float(x.data_ptr() % 64), *map(float, x.stride())], []))
            return x

        return step

    async def leads(member: RankHandle, seen: Rank) -> None:
        step = member.batched(lying(seen), name="step")
        whole = torch.zeros(5, 3)
        for x in (
            whole[1:2],
            whole[:, 1:2],
            torch.zeros(1, 3).expand(2, 3),
            whole[:1].as_strided((1, 3), (7, 1)),
        ):
            await step("r", x)

    async def follows(member: RankHandle, seen: Rank) -> None:
        member.batched(lying(seen), name="step")
        await member.follow()

    seen, errors = rank_group([leads, follows])
    assert errors == [None, None]
    assert seen[0].batches == seen[1].batches and len(seen[0].batches) == 4
    assert all(where[0] == 0.0 for where, _ in seen[1].batches)


def test_a_step_never_runs_on_the_loops_thread() -> None:
    """However short it proves, for a caller that is alone: it waits for other ranks."""
    threads: list[int] = []

    async def leads(member: RankHandle, seen: Rank) -> None:
        def step(x: Tensor) -> Tensor:
            threads.append(threading.get_ident())
            return x

        called = member.batched(step, name="step")
        for _ in range(100):
            await called("r", rows(1.0))
        assert threading.get_ident() not in threads and len(threads) == 100

    assert rank_group([leads])[1] == [None]


def test_a_gang_that_took_no_step_ends_in_order() -> None:
    """Closing is a word under whatever plan."""

    async def leaves(member: RankHandle, seen: Rank) -> None:
        """Leave the rank group at once."""

    seen, errors = rank_group([leaves, obey])
    assert errors == [None, None]
    assert seen[0].batches == seen[1].batches == []


def watchers() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "layerzero-group-watch"]


def test_a_cancelled_scope_still_leaves_the_gang() -> None:
    """Rank 0 is cancelled inside: the follower learns it, no thread or socket stays."""

    @asynccontextmanager
    async def held(member: RankHandle) -> AsyncIterator[None]:
        """The end of `async with lz.rank_group()`, inside a scope of the test."""
        try:
            yield
        finally:
            await JoinContext(member.group, member._runtime).__aexit__(*sys.exc_info())

    async def waits(member: RankHandle, seen: Rank) -> None:
        with anyio.CancelScope() as scope:
            async with held(member):
                scope.cancel()
                await anyio.sleep_forever()
        assert watchers() == []

    _, errors = rank_group([waits, obey])
    assert errors[0] is None
    assert isinstance(errors[1], DeviceLostError) and "rank 0 is gone" in str(errors[1])


def test_a_cancelled_joiner_leaves_nothing_behind() -> None:
    """Its thread goes on until the others would have come, and gives up then."""
    store = HashStore()

    async def main() -> RankGroup:
        async with lz.start(scoped=True):
            joining = lz.rank_group(2, rank=0, store=store, epoch=0, timeout_s=5.0)
            task = asyncio.ensure_future(joining.__aenter__())
            await asyncio.to_thread(TorchStore(store).get, "rank_group/0/profile/0", 20.0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            TorchStore(store).set(
                "rank_group/0/profile/1", TorchStore(store).get("rank_group/0/profile/0", 0.0) or b""
            )  # the other comes too late
            found: RankGroup = joining._group
            return found

    left = asyncio.run(main())
    assert TorchStore(store).get("rank_group/0/address", 0.5) is None and watchers() == []
    assert left.failure == "it was closed"


def test_a_rank_joins_an_epoch_once() -> None:
    """A second process that takes itself for the same rank is refused by name; the first goes on."""
    store = HashStore()

    async def joins(errors: list[BaseException | None]) -> None:
        async with lz.start(scoped=True):
            for _ in range(2):
                try:
                    async with lz.rank_group(1, rank=0, store=store, epoch=3, timeout_s=5.0):
                        errors.append(None)
                except ConsistencyError as error:
                    errors.append(error)

    found: list[BaseException | None] = []
    asyncio.run(joins(found))
    assert found[0] is None and "needs to join epoch 3 once" in str(found[1])
