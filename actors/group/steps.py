"""The steps of a gang: rank 0 sends a manifest before each, the others obey it or compare with it."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from layerzero.actors.group.channel import Follower, Leader
from layerzero.actors.group.rank_group import Gang
from layerzero.actors.group.step_message import Manifest, Position, Request, decode, encode, pack, unpack
from layerzero.selection.dispatch import Snapshot
from layerzero.spec.errors import ConsistencyError, DeviceLostError


class Steps:
    """One rank's walk through the steps of its gang.

    Rank 0 calls `take(name, requests, values)` before a step's first collective, which sends the manifest.
    A follower takes `next()` and runs what it says, or, where it forms batches itself, calls `take` too: its
    batch is compared with the manifest. Each gives the Snapshot that the step's selections are made in.
    """

    def __init__(self, gang: Gang) -> None:
        self.gang = gang
        self.position = Position(gang.rank, gang.epoch)
        self.models: dict[str, str] = {}  # which model's choices a function's are
        self.apart: set[str] = set()  # functions in which each rank runs ops of its own
        self._issuing = threading.Lock()  # manifests are numbered and sent in one order, the last one too

    def take(self, name: str, requests: Sequence[Request], values: Sequence[Any] = ()) -> Snapshot:
        """Before a step's first collective: lead it, or make sure that this rank runs what rank 0 runs.

        Raises: ConsistencyError: this rank would run something else, so the gang has failed. DeviceLostError:
            it had failed before, or a rank is gone. TypeError, ValueError: `values` cannot be sent.
        """
        gang = self.gang
        if not isinstance(gang.line, Leader):
            manifest, snapshot = self.next()
            with gang.failing():
                self.position.compare(manifest, name, requests)
            return snapshot
        packed = pack(values, name) if values else b""
        with self._issuing:
            frame = self.announced(name, requests, packed)
            try:  # what `failing` does, without the price of a context manager
                gang.line.send(frame)
            except DeviceLostError as error:
                gang.fail(str(error))
                raise
            return gang.under(self.models.get(name, ""))

    def announced(self, name: str, requests: Sequence[Request], packed: bytes = b"") -> bytes:
        """On rank 0: the frame that says what the next step is; it counts as taken.

        Raises: DeviceLostError: the gang has failed. ValueError: a request stands in it twice.
        """
        gang = self.gang
        gang.check()
        gang.turn(self.position.number + 1)
        self.position.plan = gang.plan
        decided = "" if name in self.apart else gang.decided(self.models.get(name, ""))
        return encode(self.position.issue(name, requests, decided, packed))

    def next(self, timeout_s: float | None = None) -> tuple[Manifest, Snapshot]:
        """On a follower: the next manifest, and the Snapshot that its selections are made in.

        An empty `name` says that rank 0 has ended the gang.
        Raises: ConsistencyError: this rank does not stand where rank 0 stands. DeviceLostError: rank 0 is
            gone.
        """
        gang = self.gang
        gang.check()
        if not isinstance(gang.line, Follower):
            raise ConsistencyError(f"rank {gang.rank} needs to be a follower that has joined")
        with gang.failing():
            return self.admitted(gang.line.receive(timeout_s))

    def admitted(self, frame: bytes) -> tuple[Manifest, Snapshot]:
        """What `next` gives for a frame that has been received.

        Raises: ConsistencyError: it is none, or this rank does not stand where rank 0 stands.
        """
        gang, manifest = self.gang, decode(frame)
        if manifest.name:  # the end comes under any plan
            gang.turn(manifest.number, manifest.plan)
        self.position.plan = gang.plan
        model = self.models.get(manifest.name, "")
        self.position.admit(manifest, gang.decided(model) if gang.leads_group else "")
        return manifest, gang.under(model)

    def ran(self, name: str) -> None:
        """After a step, before anybody has its results: all ranks ran the same ops in it.

        Raises: ConsistencyError: one ran others, so the gang has failed. DeviceLostError: a rank is gone.
        """
        if name not in self.apart:
            with self.gang.failing():
                self.gang.confirm(self.position.number, self.gang.decided(self.models.get(name, "")))

    def values(self, manifest: Manifest) -> list[Any]:
        """The arguments that a manifest brings, tensors on this rank's device."""
        return unpack(manifest.values, self.gang.device.device)

    def close(self) -> None:
        """Leave; on rank 0 after the word that ends the followers' walks."""
        gang = self.gang
        if not isinstance(gang.line, Leader):
            gang.close()
            return
        # A step that hangs in a follower's full line is not waited for longer than that rank was to join.
        in_turn = self._issuing.acquire(timeout=gang.timeout_s)
        try:
            gang.close(encode(self.position.issue("", (), "")) if in_turn else b"")
        finally:
            if in_turn:
                self._issuing.release()
