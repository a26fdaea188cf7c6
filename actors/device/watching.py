"""What may stand around the plans of a device."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from layerzero._util import foreign

if TYPE_CHECKING:
    from layerzero.ops.op import Op
    from layerzero.selection.record import Selection


class PlanMiddleware(Protocol):
    """What sees the calls of a device: a recorder, a guard of numerics; without one nothing is paid.

    One that only times calls and `reads_arguments` never watches transformed ones, too.
    """

    reads_arguments: bool

    def wrap(self, op: Op, selection: Selection, call: Callable[..., Any]) -> Callable[..., Any]:
        """`call`, watched; `call` itself where there is nothing to see."""
        ...


def unless_foreign(wrapped: Callable[..., Any], call: Callable[..., Any]) -> Callable[..., Any]:
    """`watched`, and `call` itself where the caller's transforms, modes or hooks would be watched with it."""
    if wrapped is call:
        return call

    def either(*args: Any) -> Any:
        return (call if foreign.in_foreign_mode() or foreign.has_transformed(args) else wrapped)(*args)

    return either
