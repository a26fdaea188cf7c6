"""What may stand around the plans of a device."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from layerzero.ops.op import Op
    from layerzero.selection.record import Selection


class Watcher(Protocol):
    """What sees the calls of a device: a recorder, a guard of numerics; without one nothing is paid."""

    def around(self, op: Op, selection: Selection, call: Callable[..., Any]) -> Callable[..., Any]:
        """`call`, watched; `call` itself where there is nothing to see."""
        ...
