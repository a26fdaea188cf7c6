"""What lives for long, left out of full collections: a server's requests would wait for them.

Libraries, models and captured steps are most of a server's objects, and most of them come after its start.
"""

from __future__ import annotations

import gc

# Python 3.12 and later freeze some hundred objects of their own at the start; a program has many thousands.
_FROZEN_BY_PYTHON = 10_000
_BEGUN: list[bool] = []  # one where the freezing is ours


def begin_freezing() -> bool:
    """Collect garbage, and leave what lives out of later collections; False where that was done before."""
    if gc.get_freeze_count() > _FROZEN_BY_PYTHON:
        return False
    gc.collect()
    gc.freeze()
    _BEGUN[:] = [True]
    return True


def freeze_again() -> None:
    """Leave what has come to live since out as well, if `begin_freezing` has begun it."""
    if _BEGUN:
        gc.collect(1)
        gc.freeze()


def end_freezing() -> None:
    """Let the collector look at everything again."""
    _BEGUN.clear()
    gc.unfreeze()
