"""What runs in the Ray actor of one GPU: a service of its own, which draws tokens for a front."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import layerzero as lz
from layerzero.runtime import current
from server.engine import Drawn
from server.front import Choice, Options
from server.service import Service

LOG = logging.getLogger("layerzero.server")
_OPENED: list[Service] = []
_REFUSED: list[str] = []


async def open_replica(options: Options) -> int:
    """Load the model and capture its steps, in every process that this device has; a request's most tokens.

    A bundle of another environment, as after an upgrade of the driver, is refused: this process compiles for
    itself and `state` says so. Raises: BundleRefusedError: the bundle is damaged, or not the pinned one.
    """
    try:
        service = Service(options, current())
    except lz.BundleRefusedError as refused:
        if {each.reason for each in refused.problems} != {lz.Reason.BUNDLE_ENVIRONMENT_DIFFERS}:
            raise
        LOG.warning("the warm-up bundle is refused: %s", refused)
        _REFUSED.append(str(refused))
        service = Service(replace(options, bundle=None, bundle_sha256=None), current())
    _OPENED.append(service)
    return service.max_model_len


async def generate(
    choice: Choice, so_far: list[tuple[Any, ...]] | None = None
) -> AsyncIterator[tuple[Any, ...]]:
    """What continues a choice and what was drawn `so_far`: the same tokens on every replica."""
    (service,) = _OPENED
    before = [Drawn(*item) for item in so_far or ()]
    if len(before) >= choice.max_tokens or (before and before[-1].ends):
        return
    grammar = await service.grammar(choice.constraint)
    tokens = service.generate(replace(choice, grammar=grammar), tuple(drawn.token for drawn in before))
    async with aclosing(tokens):
        async for drawn in tokens:
            yield tuple(drawn)


async def state() -> dict[str, Any]:
    """What `/health` says of this replica."""
    (service,) = _OPENED
    return await service.state() | ({"bundle_refused": _REFUSED[-1]} if _REFUSED else {})
