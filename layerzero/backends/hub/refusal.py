"""Why a repository is not used"""

from __future__ import annotations

from itertools import count

from layerzero._util import log
from layerzero.spec.errors import BackendNotAvailableError
from layerzero.spec.reasons import Reason

_REFUSED = count(1)  # in this process


def refusal(repository: str, why: str, reason: Reason | None = None) -> BackendNotAvailableError:
    """The error that blocks what comes out of a repository; logged, with how many there were."""
    log.warning("hub.refused", repository=repository, why=why, refused=next(_REFUSED))
    return BackendNotAvailableError(
        f"hub repository {repository!r} is refused: {why}",
        backend="hub",
        reason=reason or Reason.BACKEND_IMPORT_FAILED,
    )
