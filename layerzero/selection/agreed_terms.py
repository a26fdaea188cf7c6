"""What ranks agreed on before they choose."""

from __future__ import annotations

import hashlib

from layerzero.selection.decide import CostModel, SelectionOptions


class AgreedTerms:
    """What the ranks of a rank group agreed on, in place of one device's own health, readiness and
    measurements.

    `kernels` are the ids that may be chosen, `knobs` hold in place of this rank's settings, `modes` for every
    request; `cost` is what the ranks compared when they agreed, None where they price by estimates alone.
    `decided` is the digest of all ops so far with their kernels: equal on ranks that ran the same steps.
    """

    __slots__ = ("_hash", "_kernels_run", "cost", "kernels", "modes", "options")

    def __init__(
        self,
        kernels: frozenset[str],
        modes: frozenset[str] = frozenset(),
        *,
        cost: CostModel | None = None,
        knobs: SelectionOptions = SelectionOptions(),  # noqa: B008  frozen
    ) -> None:
        self.kernels = kernels
        self.options = knobs
        self.modes = modes
        self.cost = cost
        self._kernels_run: list[str] = []
        self._hash = hashlib.sha256()

    def record_call(self, kernel: str) -> None:
        """Count one call of an op, by the kernel that it takes."""
        self._kernels_run.append(kernel)

    @property
    def digest(self) -> str:
        """The digest of every call so far, in their order."""
        ran, self._kernels_run = self._kernels_run, []
        if ran:
            self._hash.update(";".join([*ran, ""]).encode())
        return self._hash.hexdigest()[:16]
