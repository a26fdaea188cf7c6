"""The error of a tensor that does not fit its format."""

from __future__ import annotations

from typing import Any

from layerzero.spec.errors import LayerZeroError
from layerzero.spec.reasons import Reason


class FormatError(LayerZeroError, ValueError):
    """Codes, scales or a group do not fit a number format: `argument`, what it `needs`, what it `got`.

    `reason` is the stable code. Where a dtype is wrong the error is a TypeError, too.
    """

    argument: str
    reason: Reason

    def __new__(cls, *args: Any, kind: type[Exception] = ValueError, **context: Any) -> FormatError:
        """A `FormatDtypeError` where the kind is TypeError."""
        return super().__new__(FormatDtypeError if kind is TypeError else cls)  # pyright: ignore[reportArgumentType]

    def __init__(
        self, argument: str, needs: str, got: object, reason: Reason, *, kind: type[Exception] = ValueError
    ) -> None:
        super().__init__(f"{argument} needs {needs}, got {got}", argument=argument, needs=needs, got=str(got))
        self.argument, self.reason = argument, reason


class FormatDtypeError(FormatError, TypeError):
    """A tensor of a dtype that its format does not have."""
