"""What kernels make of weights that stay the same, kept while they do."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

# Of the memory that is free when the first weight comes.
MEMORY_SHARE = 0.25
# Weights that are remembered, kept or not; each takes a few hundred bytes beside its panels.
MAX_WEIGHTS = 4096

WeightKey = tuple[int, torch.dtype, torch.Size, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class _PackedWeight:
    """A weight that was seen: its storage while that lives, its version then, its panels or None.

    `tensor` is the object whose counter the version is of: `.data` of it counts by itself.
    """

    storage: weakref.ref[Any]
    version: int
    panels: Tensor | None
    tensor: weakref.ref[Tensor]


class PackedWeights:
    """What `lay_out` makes of weights: panels, `limit` bytes of them at most, `bytes_each` for an element.

    Those in one list of `sharing` have one limit together. `equal(panels, weight)` compares all elements.

    A weight is known by its address, dtype, shape and strides. Its panels are freed with its storage and made
    anew when the tensor at hand has counted a change, or an optimizer of torch's has taken a step over its
    memory, which fused ones do not count. Another tensor over the same memory has a counter of its own: its
    elements are compared, all of them, when it comes. Changes that are not counted, through `.data` of this
    very tensor, numpy or a fused function called by hand, are seen where they change one of the elements that
    the kernel compares, one a row. Not kept: weights made in inference mode, whose changes torch never
    counts, and what comes when the limit is reached; such a weight stays so until it changes, so that equal
    calls take equal ways.
    """

    def __init__(
        self,
        lay_out: Callable[[Tensor], Tensor],
        limit: int,
        bytes_each: int,
        sharing: list[PackedWeights],
        equal: Callable[[Tensor, Tensor], bool] | None = None,
    ) -> None:
        self.lay_out = lay_out
        self._equal = equal or (lambda panels, weight: torch.equal(panels, lay_out(weight)))
        self._bytes_each = bytes_each
        self._limit = limit
        self._entries: dict[WeightKey, _PackedWeight] = {}
        self._sharing = sharing
        self._sharing.append(self)
        register_optimizer_step_post_hook(self.on_optimizer_step)

    @property
    def nbytes(self) -> int:
        """Bytes of all panels."""
        return sum(entry.panels.nbytes for entry in list(self._entries.values()) if entry.panels is not None)

    def of(self, weight: Tensor) -> Tensor | None:
        """The panels of `weight`, made now where it is new or was changed; None where it is not kept."""
        if weight.is_inference():
            return None
        entry = self._entries.get((weight.data_ptr(), weight.dtype, weight.shape, weight.stride()))
        if (
            entry is None
            or entry.version != weight._version
            or entry.storage() is not weight.untyped_storage()
        ):
            return self.repack(weight)
        if entry.tensor() is not weight:
            return self._of_another(weight, entry)
        return entry.panels

    def of_or_made(self, weight: Tensor) -> Tensor:
        """The panels of `weight`, made for this call alone where it is not kept."""
        panels = self.of(weight)
        return self.lay_out(weight) if panels is None else panels

    def ready(self, weight: Tensor) -> Tensor | None:
        """The panels of `weight` where this very tensor has them unchanged; nothing is made or compared."""
        entry = self._entries.get((weight.data_ptr(), weight.dtype, weight.shape, weight.stride()))
        if entry is None or entry.tensor() is not weight or weight.is_inference():
            return None
        return entry.panels if entry.version == weight._version else None

    def _of_another(self, weight: Tensor, entry: _PackedWeight) -> Tensor | None:
        """The panels for another tensor over the memory, whose counter may be equal by chance."""
        if entry.panels is None or not self._equal(entry.panels, weight):
            return self.repack(weight)
        place = (weight.data_ptr(), weight.dtype, weight.shape, weight.stride())
        self._entries[place] = replace(entry, tensor=weakref.ref(weight))
        return entry.panels

    def on_optimizer_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Forget what is in memory that an optimizer has just written; fused ones count no version."""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if not all(type(p) in (Tensor, torch.nn.Parameter) for p in parameters):
            self._entries.clear()  # whose memory a subclass writes is its own affair
            return
        written = {p.untyped_storage().data_ptr() for p in parameters}
        for place, entry in list(self._entries.items()):
            storage = entry.storage()
            if storage is None or storage.data_ptr() in written:
                self._entries.pop(place, None)

    def repack(self, weight: Tensor) -> Tensor | None:
        """Panels of `weight` as it is now, in place of those there are; None where it is not kept."""
        # No lock: a storage may die, and call `_gone`, at any allocation here.
        place = (weight.data_ptr(), weight.dtype, weight.shape, weight.stride())
        self._entries.pop(place, None)
        for oldest in list(self._entries)[: max(0, len(self._entries) - MAX_WEIGHTS + 1)]:
            self._entries.pop(oldest, None)
        version, gone = weight._version, functools.partial(self._gone, place)
        used = sum(each.nbytes for each in self._sharing)
        fits = used + self._bytes_each * weight.numel() <= self._limit
        panels = self.lay_out(weight) if fits else None
        storage = weakref.ref(weight.untyped_storage(), gone)
        self._entries[place] = _PackedWeight(storage, version, panels, weakref.ref(weight))
        return panels

    def _gone(self, place: WeightKey, storage: weakref.ref[Any]) -> None:
        entry = self._entries.get(place)
        if entry is not None and entry.storage is storage:
            self._entries.pop(place, None)
