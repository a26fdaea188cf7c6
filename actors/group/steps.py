"""The steps of a rank group: rank 0 sends a step message before each, the others obey it or compare with
it."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from layerzero.actors.group.channel import FollowerChannel, LeaderChannel
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
from layerzero.selection.dispatch import DispatchState
from layerzero.spec.errors import ConsistencyError, DeviceLostError


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
        DeviceLostError:
            it had failed before, or a rank is gone. TypeError, ValueError: `values` cannot be sent.
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
        selections_digest = (
            "" if name in self.rank_specific else group.selections_digest(self.models.get(name, ""))
        )
        return encode(self.sequence.next_message(name, requests, selections_digest, packed))

    def next_step(self, timeout_s: float | None = None) -> tuple[StepMessage, DispatchState]:
        """On a follower: the next step message, and the DispatchState that its selections are made in.

        An empty `name` says that rank 0 has ended the rank group.
        Raises: ConsistencyError: this rank is not where rank 0 is. DeviceLostError: rank 0 is
            gone.
        """
        group = self.group
        group.raise_if_failed()
        if not isinstance(group.channel, FollowerChannel):
            raise ConsistencyError(f"rank {group.rank} needs to be a follower that has joined")
        with group.fail_on_error():
            return self.accept(group.channel.receive(timeout_s))

    def accept(self, frame: bytes) -> tuple[StepMessage, DispatchState]:
        """What `next` gives for a frame that has been received.

        Raises: ConsistencyError: it is none, or this rank is not where rank 0 is.
        """
        group, message = self.group, decode(frame)
        if message.name:  # the end comes under any plan
            group.activate_plan(message.number, message.plan_digest)
        self.sequence.plan_digest = group.plan_digest
        model = self.models.get(message.name, "")
        self.sequence.accept(message, group.selections_digest(model) if group.same_hardware_as_rank0 else "")
        return message, group.state_for(model)

    def end_step(self, name: str) -> None:
        """After a step, before anybody has its results: all ranks ran the same ops in it.

        Raises: ConsistencyError: one ran others, so the rank group has failed. DeviceLostError: a rank is
        gone.
        """
        if name not in self.rank_specific:
            with self.group.fail_on_error():
                self.group.confirm(
                    self.sequence.number, self.group.selections_digest(self.models.get(name, ""))
                )

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
