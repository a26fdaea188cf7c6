"""`lz.rank_group`: ranks that meet in collectives run the same requests in the same order under one plan.

Rank 0 has the coroutines, the queue and every decision. It announces each batch by a step message, which
every other rank obeys (`follow`), or compares its own batch with, before the first collective.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import anyio
import anyio.to_thread
import torch
from torch.distributed import Store  # type: ignore[attr-defined]  # public, not declared

from layerzero.actors.group.config import GroupConfig, Mode
from layerzero.actors.group.functions import (
    CollectiveFunction,
    Function,
    GroupFunction,
    ReplicatedResults,
    aligned_columns,
    group_function,
    with_fewest_callers,
)
from layerzero.actors.group.plan import AgreedPlan
from layerzero.actors.group.rank_group import RankGroup
from layerzero.actors.group.step_message import RequestId, check_request, check_sendable
from layerzero.actors.group.steps import FollowerLoop, GroupScope, StepReader, Steps, StepWatch
from layerzero.actors.remote.stores import TorchStore
from layerzero.calls.blocking import context_runtime
from layerzero.calls.scope import SCOPE
from layerzero.ops.checks import need_int
from layerzero.scheduler.scheduled_device import ScheduledDevice
from layerzero.selection.dispatch import DispatchState
from layerzero.spec.errors import ConfigurationError, ConsistencyError, DeviceLostError, LayerZeroError

if TYPE_CHECKING:
    from layerzero.runtime import Runtime


class RankHandle:
    """One rank of a rank group, joined; what `async with lz.rank_group(...)` gives.

    `rank` and `ranks` say which one it is, `agreed_plan` which plan is in force. `group` is this rank's
    membership, which knows its device and whether it has failed.
    """

    def __init__(self, group: RankGroup, runtime: Runtime) -> None:
        self.group = group
        self._runtime = runtime
        self._steps = Steps(group)
        self._watch = StepWatch(group, self._lose_step)
        self._functions: dict[str, GroupFunction] = {}
        self._batched: list[CollectiveFunction] = []
        self._walk: FollowerLoop | None = None  # of a follower's `follow`
        self._results = ReplicatedResults()
        self.rank, self.ranks, self.epoch = group.rank, group.ranks, group.epoch

    @property
    def agreed_plan(self) -> AgreedPlan:
        """The plan in force."""
        assert self.group.agreed_plan is not None
        return self.group.agreed_plan

    @property
    def plan_digest(self) -> str:
        """The digest of the plan in force: equal on every rank."""
        return self.group.plan_digest

    @property
    def failure(self) -> str | None:
        """Why the rank group has failed; None while it has not."""
        return self.group.failure

    def batched(
        self,
        fn: Function,
        *,
        name: str | None = None,
        send: bool = True,
        model: str = "",
        alike: bool = True,
        replicated: bool = False,
        unsent: Sequence[str] = (),
        prepare: Callable[[list[int]], None] | None = None,
        batches: int = 1,
    ) -> Callable[..., Awaitable[Any]]:
        """`lz.batched` for a function with collectives in it: `await step(request, *args)`.

        `request` (int or str) names the caller's request, once in a batch. On every rank the function has to
        be given under the same `name`. `send=True` sends the batch's arguments along, for followers that
        `follow`; `send=False` is for ranks that all form batches themselves and only compare them. Functions
        of one `model` share its selections; other models, under the same plan, choose for themselves.
        `alike=False` is for stages of a pipeline: ranks run different ops, whose choices are not compared.
        `replicated=True` says that the tensor which `fn` returns is equal on all ranks. Given to a later
        call, its rows are then taken on each rank and do not pass through the host, as `lz.run_ahead` needs
        it; do not write into them. `unsent` names parameters that only rank 0 needs: other ranks get None
        for each caller. `prepare(counts)` is called on a follower for each step when it is announced, on a
        thread beside the steps before it: to post what it will receive. Of `batches` above 1 each has callers
        of its own, so that as many are under way at once: a caller joins the one that has fewest.
        Raises: ConfigurationError: another function has the name; `replicated` or `unsent` where nothing is
            sent. ValueError: `unsent` names no parameter, `batches` is below 1. When awaited, for the caller
            at fault alone: ValueError: its request is under way already. TypeError, ValueError: one cannot be
            sent.
        """
        function_name = name or str(getattr(fn, "__qualname__", type(fn).__name__))
        if not send and (replicated or unsent):
            raise ConfigurationError("replicated and unsent need send=True: nothing else brings values")
        need_int("batches", batches, low=1)
        names = [function_name] if batches == 1 else [f"{function_name} {n}" for n in range(batches)]
        if known := [each for each in names if each in self._functions]:
            raise ConfigurationError(f"name needs to be new in this rank group, got {known[0]!r} again")
        function = group_function(function_name, fn, replicated, unsent, prepare)
        functions = [self._collective(each, function, model, send=send, alike=alike) for each in names]
        under_way: set[RequestId] = set()

        async def step(request: RequestId, *args: Any, **options: Any) -> Any:
            check_request(request)
            if request in under_way:
                raise ValueError(f"request needs to be once in {function_name}, got {request!r} again")
            scope = SCOPE.get()
            if scope is not None and scope.policy:
                raise ConfigurationError(
                    f"{function_name} needs the policy of a block inside the function, where every rank has "
                    f"it, got one around the call: {'; '.join(map(str, scope.policy.rules))[:200]}"
                )
            if send:
                check_sendable(args, function_name, function.unsent)
            batched = with_fewest_callers(functions)
            under_way.add(request)
            batched.callers += 1
            try:
                return await batched(request, *args, **options)
            finally:
                batched.callers -= 1
                under_way.discard(request)

        return step

    def _collective(
        self, name: str, function: GroupFunction, model: str, *, send: bool, alike: bool
    ) -> CollectiveFunction:
        """What batches the callers of `function` under `name`, which every rank knows."""
        self._functions[name] = function
        self._steps.models[name] = model if alike else f"{model or function.name}, apart"
        if not alike:
            self._steps.rank_specific.add(name)

        def run(requests: list[RequestId], *columns: Any, counts: list[int]) -> Any:
            values: tuple[Any, ...] = ()
            arguments: Sequence[Any] = columns
            if send:
                values = (counts, *function.message_columns(columns, batched.calls, self._results))
                arguments = aligned_columns(columns)
            with self._on_device(), self._scope(self._steps.start_step(name, requests, values)):
                return self._call(name, arguments, counts)

        batched = CollectiveFunction(run, pure=False, name=name, device=self.group.device.device)
        self._batched.append(batched)
        return batched

    def need_same(self, values: Mapping[str, str]) -> None:
        """Compare `values` with every other rank's before the first collective; every rank calls this.

        Raises: ConsistencyError, with the reason RANKS_DIFFER: a rank has another value. DeviceLostError: one
            gave none in time.
        """
        self.group.need_same(values)

    @property
    def _device(self) -> ScheduledDevice:
        device = self.group.device
        assert isinstance(device, ScheduledDevice)  # of a runtime
        return device

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether every rank has the rows of `tensor`, so that a call with it waits for no device."""
        return self._results.find(tensor) is not None

    def _call(self, name: str, columns: Sequence[Any], counts: list[int]) -> Any:
        function = self._functions[name]
        try:
            with self._watch.around(self._steps.sequence.number):
                out = function(columns, counts)
            if function.replicated:
                self._results.keep(self._steps.sequence.number, out)
        except BaseException as error:
            # A rank that left breaks the others' collectives, whose error does not say why it left.
            if isinstance(error, RuntimeError) and (why := self.group.failure_reason()) is not None:
                self.group.fail(why)
                raise DeviceLostError(f"the rank group failed in {name}: {why}", retryable=False) from error
            # Other ranks are in the same step: it is unknown whether they wait in a collective of it.
            self.group.fail(f"{name} raised {type(error).__name__}: {error}"[:300])
            raise
        self._steps.end_step(name)
        return out

    def using_model(self, model: str) -> AbstractContextManager[None]:
        """A block whose ops are chosen for `model` under the rank group's plan, on this rank alone.

        For what no other rank runs: a draft model beside a target that all ranks share. The ops inside are
        blocking ones.
        """
        return self._scope(self.group.state_for(model))

    def _on_device(self) -> AbstractContextManager[object]:
        """A block on this rank's GPU: a new thread's current one is the first, whichever this rank's is."""
        device = self.group.device.device
        return torch.cuda.device(device) if device.type == "cuda" else nullcontext()

    @contextmanager
    def _scope(self, snapshot: DispatchState) -> Iterator[None]:
        plan = -1 - self.agreed_plan.version - (self.epoch << 32)
        token = SCOPE.set(GroupScope(snapshot, self._runtime, plan))
        try:
            yield
        finally:
            SCOPE.reset(token)

    async def follow(self) -> None:
        """On a follower: run what rank 0 announces, until rank 0 closes the rank group.

        Raises: ConsistencyError: this rank cannot follow. DeviceLostError: rank 0, or another rank, is gone.
            What a function raises.
        """
        if self.rank == 0:
            raise ConfigurationError("follow needs a follower, got rank 0: it decides")
        self._walk = FollowerLoop(self._device.loop_drivers.current().loop)
        await self._walk.run(self._follow)

    def _lose_step(self, error: DeviceLostError) -> None:
        """Leave a step that hangs to its thread: its callers, and `follow`, have `error`."""
        if self._walk is not None:
            self._walk.end(error)
            return
        self._device.worker.give_up()
        for batched in self._batched:
            self._device.loop_drivers.give_up(batched, error)

    def _follow(self) -> None:
        inference = self.group.device.settings.inference is not False
        with (
            self._on_device(),
            torch.inference_mode(inference),
            StepReader(self._steps, self._functions) as announced,
        ):
            while True:
                message, snapshot, values = announced.next_step()
                if not message.name:
                    return
                if message.name not in self._functions:
                    with self.group.fail_on_error():
                        raise ConsistencyError(
                            f"rank {self.rank} needs the function {message.name!r} that rank 0 runs, got "
                            f"{', '.join(sorted(self._functions)) or 'none'}"
                        )
                counts, columns, in_parts = values
                with self._scope(snapshot):
                    with self.group.fail_on_error():
                        function = self._functions[message.name]
                        columns = function.read_columns(counts, columns, in_parts, self._results)
                    self._call(message.name, columns, counts)

    async def propose(self, plan: AgreedPlan) -> AgreedPlan:
        """On rank 0: agree on another plan, with followers that call `agree(plan.version)` meanwhile.

        Raises: ConsistencyError: a rank refused or did not answer in time; the old plan stays in force.
        """
        return await anyio.to_thread.run_sync(self.group.propose, plan)

    async def agree(self, version: int) -> AgreedPlan:
        """On a follower: answer rank 0's proposal of plan `version`.

        Raises: ConsistencyError: this or another rank refused; the old plan stays in force.
        """
        return await anyio.to_thread.run_sync(self.group.agree, version)

    def close(self) -> None:
        """Leave the rank group; on rank 0 the followers' `follow` returns."""
        failed = self.failure is not None
        self._steps.close()
        if failed:
            self._device.loop_drivers.lose_reads(None)

    def watch_steps(self) -> None:
        """Have steps end that wait for a rank that has gone; once the rank group has been joined."""
        self._watch.start()


class JoinContext:
    """A rank group to be entered; what `lz.rank_group` returns."""

    def __init__(self, group: RankGroup, runtime: Runtime) -> None:
        self._group = group
        self._handle = RankHandle(group, runtime)

    async def __aenter__(self) -> RankHandle:
        try:
            await anyio.to_thread.run_sync(self._group.join, abandon_on_cancel=True)
        except BaseException:
            self._group.close()  # the join thread keeps running after cancellation
            raise
        self._handle.watch_steps()
        return self._handle

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None and not isinstance(error, LayerZeroError):
            self._group.fail(f"rank {self._group.rank} left with {type(error).__name__}: {error}"[:300])
        with anyio.CancelScope(shield=True):  # the other ranks block until this one leaves
            await anyio.to_thread.run_sync(self._handle.close)


def rank_group(
    ranks: int | None = None,
    *,
    rank: int | None = None,
    store: Store | None = None,
    mode: Mode = "inference",
    tp_invariant: bool = False,
    epoch: int | None = None,
    device: torch.device | str | None = None,
    host: str = "127.0.0.1",
    timeout_s: float = 30.0,
    on_failure: Callable[[str], None] | None = None,
) -> JoinContext:
    """The tensor-parallel group that this process is a rank of; `async with` joins it.

    `rank`, `ranks` and `epoch` default to torchrun's RANK, WORLD_SIZE and TORCHELASTIC_RESTART_COUNT, `store`
    to the store of torch.distributed, which has to be initialised then. `GroupConfig` describes the others.
    A group that has failed never returns: its ranks restart together, under a new `epoch`. For ranks on the
    devices of a cluster see `lz.remote_rank_group`.

    Raises: ConfigurationError: something is neither given nor in the environment.

    Example:
        >>> import asyncio, torch, layerzero as lz
        >>> from torch.distributed import HashStore
        >>> async def main():
        ...     async with lz.start(scoped=True), lz.rank_group(1, rank=0, store=HashStore()) as group:
        ...         step = group.batched(lambda x: x * 2, name="step")
        ...         return await step("request", torch.ones(1, 2))
        >>> asyncio.run(main())
        tensor([[2., 2.]])
    """
    runtime = context_runtime()
    config = GroupConfig(
        rank=_number("rank", rank, "RANK"),
        ranks=_number("ranks", ranks, "WORLD_SIZE"),
        epoch=epoch if epoch is not None else int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")),
        mode=mode, tp_invariant=tp_invariant, host=host, timeout_s=timeout_s, on_failure=on_failure,
    )  # fmt: skip
    return join_with(runtime, config, _default_store() if store is None else store, device)


def join_with(
    runtime: Runtime, config: GroupConfig, store: Store, device: torch.device | str | None = None
) -> JoinContext:
    """The group of a configuration, with a device of `runtime`.

    When the group fails, what callers read from the device fails before anything else: its steps in flight
    may never end, or end with sums that lack a rank's part.
    """
    ready = runtime.device(device)

    def on_failure(why: str) -> None:
        ready.loop_drivers.lose_reads(DeviceLostError(f"the rank group failed: {why}", retryable=False))
        if config.on_failure is not None:
            config.on_failure(why)

    group_store = TorchStore(store, token=config.token)
    group = RankGroup(ready, group_store, replace(config, on_failure=on_failure))
    return JoinContext(group, runtime)


def _number(name: str, value: int | None, variable: str) -> int:
    if value is not None:
        return value
    text = os.environ.get(variable, "")
    if not text.isdigit():
        raise ConfigurationError(f"{name} needs a number, or the variable {variable}, got {text!r}")
    return int(text)


def _default_store() -> Store:
    from torch import distributed
    from torch.distributed.distributed_c10d import _get_default_store

    if not (distributed.is_available() and distributed.is_initialized()):
        needs = "a torch.distributed.Store, or torch.distributed.init_process_group() before"
        raise ConfigurationError(f"store needs {needs}, got None")
    return _get_default_store()
