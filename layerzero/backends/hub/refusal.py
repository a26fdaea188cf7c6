"""Why a repository is not used"""

from __future__ import annotations

from layerzero.spec.errors import BackendNotAvailableError
from layerzero.spec.reasons import Reason


def refusal(repository: str, why: str, reason: Reason | None = None) -> BackendNotAvailableError:
    """The error that blocks what comes out of a repository."""
    return BackendNotAvailableError(
        f"hub repository {repository!r} is refused: {why}",
        backend="hub",
        reason=reason or Reason.BACKEND_IMPORT_FAILED,
    )
