"""What ranks agreed on before they choose."""

from __future__ import annotations

import hashlib

from layerzero.selection.decide import CostModel, Knobs


class Terms:
    """What the ranks of a gang agreed on, in place of one device's own health, readiness and measurements.

    `kernels` are the ids that may be chosen, `knobs` hold in place of this rank's settings, `modes` for every
    request; `cost` is what the ranks compared when they agreed, None where they price by estimates alone.
    `decided` is the digest of all choices so far: equal on ranks that ran the same steps.
    """

    __slots__ = ("_hash", "cost", "decided", "kernels", "knobs", "modes")

    def __init__(
        self,
        kernels: frozenset[str],
        modes: frozenset[str] = frozenset(),
        *,
        cost: CostModel | None = None,
        knobs: Knobs = Knobs(),  # noqa: B008  frozen
    ) -> None:
        self.kernels = kernels
        self.knobs = knobs
        self.modes = modes
        self.cost = cost
        self.decided = ""
        self._hash = hashlib.sha256()

    def note(self, op: str, kernel: str) -> None:
        """Count one new choice."""
        self._hash.update(f"{op} {kernel};".encode())
        self.decided = self._hash.hexdigest()[:16]
