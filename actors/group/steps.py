"""The steps of a rank group: rank 0 sends a message before each, the others obey it or compare with it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import copy_context
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import anyio
import torch
from torch import distributed

from layerzero._util import log
from layerzero.actors.device.local_device import LocalDevice
from layerzero.actors.group.channel import FollowerChannel, LeaderChannel
from layerzero.actors.group.functions import GroupFunction
from layerzero.actors.group.rank_group import RankGroup
from layerzero.actors.group.step_message import (
    RequestId,
    StepMessage,
    StepSequence,
    decode,
    encode,
    pack,
    unpack,
)
from layerzero.calls.scope import Scope
from layerzero.selection.dispatch import DispatchState
from layerzero.selection.policy.policy import Policy, merge
from layerzero.spec.errors import ConfigurationError, ConsistencyError, DeviceLostError

if TYPE_CHECKING:
    from layerzero.runtime import Runtime

MAX_ANNOUNCED = 64  # step messages that a follower has read and not begun
ENDS_BY_ITSELF_S = 1.0  # a step whose collectives break with the rank that they wait for
LOOK_S = 0.02
_PREPARED_S = 5.0  # and the group's limit: rank 0 has said something by then, and what it said is prepared


class Steps:
    """One rank's walk through the steps of its rank group.

    Rank 0 calls `take(name, requests, values)` before a step's first collective, which sends the step
    message. A follower takes `next()` and runs what it says, or, where it forms batches itself, calls `take`
    too: its batch is compared with the step message. Each gives the DispatchState that the step's selections
    are made in.
    """

    def __init__(self, group: RankGroup) -> None:
        self.group = group
        self.sequence = StepSequence(group.rank, group.epoch)
        self.models: dict[str, str] = {}  # which model's choices a function's are
        self.rank_specific: set[str] = set()  # functions in which each rank runs ops of its own
        self._sending = threading.Lock()  # step messages are numbered and sent in one order, the last one too

    def start_step(
        self, name: str, requests: Sequence[RequestId], values: Sequence[Any] = ()
    ) -> DispatchState:
        """Before a step's first collective: lead it, or make sure that this rank runs what rank 0 runs.

        Raises: ConsistencyError: this rank would run something else, so the rank group has failed.
            DeviceLostError: it had failed before, or a rank is gone. TypeError, ValueError: `values` cannot
            be sent.
        """
        group = self.group
        if not isinstance(group.channel, LeaderChannel):
            message, snapshot = self.next_step()
            with group.fail_on_error():
                self.sequence.compare(message, name, requests)
            return snapshot
        packed = pack(values, name) if values else b""
        with self._sending:
            frame = self.next_frame(name, requests, packed)
            try:  # what `failing` does, without the price of a context manager
                group.channel.send(frame)
            except DeviceLostError as error:
                group.fail(str(error))
                raise
            return group.state_for(self.models.get(name, ""))

    def next_frame(self, name: str, requests: Sequence[RequestId], packed: bytes = b"") -> bytes:
        """On rank 0: the frame that says what the next step is; it counts as taken.

        Raises: DeviceLostError: the rank group has failed. ValueError: a request is in it twice.
        """
        group = self.group
        group.raise_if_failed()
        group.activate_plan(self.sequence.number + 1)
        self.sequence.plan_digest = group.plan_digest
        ran = "" if name in self.rank_specific else group.selections_digest(self.models.get(name, ""))
        return encode(self.sequence.next_message(name, requests, ran, packed))

    def next_step(self, timeout_s: float | None = None) -> tuple[StepMessage, DispatchState]:
        """On a follower: the next step message, and the DispatchState that its selections are made in.

        An empty `name` says that rank 0 has ended the rank group.
        Raises: ConsistencyError: this rank is not where rank 0 is. DeviceLostError: rank 0 is gone.
        """
        group = self.group
        group.raise_if_failed()
        if not isinstance(group.channel, FollowerChannel):
            raise ConsistencyError(f"rank {group.rank} needs to be a follower that has joined")
        with group.fail_on_error():
            return self.accept(decode(group.channel.receive(timeout_s)))

    def accept(self, message: StepMessage) -> tuple[StepMessage, DispatchState]:
        """What `next_step` gives for a message that has been received.

        Raises: ConsistencyError: this rank is not where rank 0 is.
        """
        group = self.group
        if message.name:  # the end comes under any plan
            group.activate_plan(message.number, message.plan_digest)
        self.sequence.plan_digest = group.plan_digest
        model = self.models.get(message.name, "")
        self.sequence.accept(message, group.selections_digest(model) if group.same_hardware_as_rank0 else "")
        return message, group.state_for(model)

    def end_step(self, name: str) -> None:
        """After a step, before anybody has its results: all ranks ran the same ops in it.

        Raises: ConsistencyError: one ran others, so the rank group failed. DeviceLostError: a rank is gone.
        """
        if name not in self.rank_specific:
            ran = self.group.selections_digest(self.models.get(name, ""))
            with self.group.fail_on_error():
                self.group.confirm(self.sequence.number, ran)

    def values(self, message: StepMessage) -> list[Any]:
        """The arguments that a step message brings, tensors on this rank's device."""
        return unpack(message.values, self.group.device.device)

    def close(self) -> None:
        """Leave; on rank 0 after the word that ends the followers' walks."""
        group = self.group
        if not isinstance(group.channel, LeaderChannel):
            group.close()
            return
        # A step that hangs in a follower's full line is not waited for longer than that rank was to join.
        in_turn = self._sending.acquire(timeout=group.timeout_s)
        try:
            group.close(encode(self.sequence.next_message("", (), "")) if in_turn else b"")
        finally:
            if in_turn:
                self._sending.release()


class StepReader:
    """A follower's step messages; where a function prepares steps, they are read while the steps before run.

    Enter it around the walk through the steps.
    """

    def __init__(self, steps: Steps, functions: Mapping[str, GroupFunction]) -> None:
        self._steps, self._functions = steps, functions
        self._is_ahead = any(function.prepare is not None for function in functions.values())
        self._messages: SimpleQueue[tuple[StepMessage, list[Any]] | Exception] = SimpleQueue()
        self._room = threading.Semaphore(MAX_ANNOUNCED)  # a follower that hangs takes no more
        self._ended = False
        self._reader = threading.Thread(target=self._read, name="layerzero-group-read", daemon=True)

    def __enter__(self) -> StepReader:
        if self._is_ahead:
            self._steps.group.take_channel = self._stop
            self._reader.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._end()

    def _end(self) -> None:
        self._ended = True
        self._room.release()

    def _stop(self) -> bool:
        """Have the thread leave the channel, at a heartbeat at the latest; whether it has."""
        self._end()
        self._reader.join(self._steps.group.timeout_s + _PREPARED_S)
        return not self._reader.is_alive()

    def next_step(self) -> tuple[StepMessage, DispatchState, list[Any]]:
        """As `Steps.next_step`, with what the message brings.

        Raises: what preparing a step raises, when the steps before it have been run.
        """
        steps = self._steps
        if not self._is_ahead:
            message, state = steps.next_step()
            return message, state, steps.values(message) if message.name else []
        steps.group.raise_if_failed()
        read = self._messages.get()
        self._room.release()
        if isinstance(read, Exception):
            steps.group.fail(str(read) or type(read).__name__)
            raise read
        with steps.group.fail_on_error():
            return *steps.accept(read[0]), read[1]

    def _read(self) -> None:
        """On the thread of the messages: until the last one, an error, or the end of the walk."""
        steps, group = self._steps, self._steps.group
        inference = group.device.settings.inference is not False
        try:
            assert isinstance(group.channel, FollowerChannel)  # of a follower that has joined
            with torch.inference_mode(inference):
                while self._has_room() and (frame := self._frame(group.channel)):
                    message = decode(frame)
                    values = steps.values(message) if message.name else []
                    function = self._functions.get(message.name)
                    if function is not None and function.prepare is not None:
                        function.prepare(values[0])
                    self._messages.put((message, values))
                    if not message.name:
                        return
        except Exception as error:
            self._messages.put(error)

    def _frame(self, channel: FollowerChannel) -> bytes:
        """The next step message; b"" at the end of the walk."""
        while not (frame := channel.receive(heartbeat=True)) and not self._ended:
            pass
        return frame

    def _has_room(self) -> bool:
        """Wait until a step has begun where many have not; False at the end of the walk."""
        self._room.acquire()
        return not self._ended


class StepWatch:
    """Ends a step that waits for a rank that has gone: nothing in the step itself can see it.

    A library's collective may wait without end for a rank that has left: on a GPU in what has been launched,
    long after the host left the step. `around(number)` is a block for a step; `lose(error)` is called where
    the group has failed and the step did not end by itself.
    """

    def __init__(self, group: RankGroup, lose: Callable[[DeviceLostError], None]) -> None:
        self._group, self._lose = group, lose
        self._number = 0  # of the step that this rank is in
        self._launched: tuple[int, Any] = 0, None  # the last step, and the event behind its launches
        self._event = torch.cuda.Event() if group.device.device.type == "cuda" else None

    def start(self) -> None:
        """Begin, in a rank group that has been joined."""
        self._group.when_failed(lambda why: self.on_thread(self._let_go))
        if isinstance(self._group.channel, FollowerChannel):
            self.on_thread(self._wait_for_hang_up)

    @staticmethod
    def on_thread(run: Callable[[], object]) -> None:
        """Run it on a daemon thread of its own."""
        threading.Thread(target=run, name="layerzero-group-steps", daemon=True).start()

    @contextmanager
    def around(self, number: int) -> Iterator[None]:
        """A block for step `number`."""
        self._number = number
        try:
            yield
            if self._event is not None:
                self._event.record()
                self._launched = number, self._event
        finally:
            self._number = 0

    def _under_way(self) -> int:
        """The step that the host is in, else the last one where the GPU has not done it; 0 for none."""
        launched, event = self._launched
        return self._number or (launched if event is not None and not event.query() else 0)

    def _wait_for_hang_up(self) -> None:
        """On a follower: fail the group where rank 0 hangs up in the middle of a step.

        A rank 0 that left in order has done its part of every step, and each has the group's time to end.
        """
        group, channel = self._group, self._group.channel
        assert isinstance(channel, FollowerChannel)
        channel.wait_for_hang_up()
        while group.failure is None:
            number = self._under_way()
            hangs = number and not self._ends(number, ENDS_BY_ITSELF_S)
            if hangs and not (channel.was_left() and self._ends(number, group.timeout_s)):
                group.fail(f"rank 0 is gone: it hung up while rank {group.rank} was in step {number}")
            time.sleep(LOOK_S)

    def _ends(self, number: int, limit_s: float) -> bool:
        until = time.monotonic() + limit_s
        while self._under_way() == number and time.monotonic() < until:
            time.sleep(LOOK_S)
        return self._under_way() != number

    def _let_go(self) -> None:
        """The group has failed: break what a step waits in, and fail its callers where it does not end."""
        number = self._under_way()
        if number and not self._ends(number, ENDS_BY_ITSELF_S):
            _abort_collectives()
            if not self._ends(number, ENDS_BY_ITSELF_S):
                why = f"the rank group failed in step {number}: {self._group.failure}"
                self._lose(DeviceLostError(why, retryable=False))


class FollowerLoop:
    """A follower's walk through the steps, on a thread that is left where it hangs; callers get an error."""

    def __init__(self, loop: Any) -> None:
        self._loop, self._ended = loop, anyio.Event()
        self._error: BaseException | None = None
        self._over = False

    async def run(self, follow: Callable[[], None]) -> None:
        """Wait until `follow()` has ended, or `end` was called.

        Raises: the error of whichever came first.
        """

        def walk() -> None:
            error: BaseException | None = None
            try:
                follow()
            except BaseException as raised:
                error = raised
            self.end(error)

        StepWatch.on_thread(partial(copy_context().run, walk))
        await self._ended.wait()
        if self._error is not None:
            raise self._error

    def end(self, error: BaseException | None) -> None:
        """From any thread: end the wait; only the first end counts."""
        if not self._over:
            self._over, self._error = True, error
            with suppress(RuntimeError):  # the loop is closed, so no caller waits
                self._loop.call_soon_threadsafe(self._ended.set)


def _abort_collectives() -> None:
    """Abort torch's process groups of this process, where they can be: NCCL's end what waits in them."""
    if not (distributed.is_available() and distributed.is_initialized()):
        return
    for process_group in list(distributed.distributed_c10d._world.pg_map):
        try:
            process_group.abort()
        except (AttributeError, RuntimeError) as error:  # a library or a backend that cannot
            log.warning("rank_group.not_aborted", group=process_group.group_name, error=repr(error))


class GroupScope(Scope):
    """The scope of a rank group's step: every selection is made in the snapshot that all ranks agreed on."""

    __slots__ = ("_state", "_version")

    def __init__(self, snapshot: DispatchState, runtime: Runtime | None, version: int) -> None:
        """`version` is the number of the plan in force, below 0."""
        super().__init__(runtime=runtime)
        self._state = snapshot
        self._version = version

    def nested(self, policy: Policy) -> Scope:
        """The scope with a block's rules, which the function has on every rank: among what was agreed on."""
        outer, terms = self._state, self._state.agreed_terms
        assert terms is not None
        inner = merge(outer.policy, policy)
        if (state := terms.blocks.get(inner.digest)) is None:
            terms.blocks.put(inner.digest, state := DispatchState(outer.version, inner, agreed_terms=terms))
        return GroupScope(state, self.runtime, self._version)

    @property
    def key(self) -> Hashable:
        """Itself: no other step's selections are its own."""
        return self

    def generation(self, device: LocalDevice) -> int:
        """The plan's: a change on one rank alone must not make it capture what no other captures."""
        return self._version

    def snapshot(self, device: Any, op: str, backend: str | None) -> DispatchState:
        """The rank group's snapshot.

        Raises: ConfigurationError: `backend=` asks for what one rank alone would do.
        """
        if backend is not None:
            raise ConfigurationError(
                f"backend needs None inside a rank group's step, got {backend!r}: put it into rank 0's policy"
            )
        return self._state
