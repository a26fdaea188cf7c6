"""`rank_group`: the ranks of a tensor-parallel model, in this process or on the devices of a cluster."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, overload

from layerzero.actors.group.cluster import RemoteRankGroup, remote_rank_group
from layerzero.actors.group.join import JoinContext, join_rank_group
from layerzero.runtime import Runtime


@overload
def rank_group(runtime: Runtime, ranks: int | None = None, **options: Any) -> JoinContext: ...
@overload
def rank_group(
    runtime: Runtime, ranks: int | Sequence[str] | None = None, *, build: Callable[..., Any], **options: Any
) -> RemoteRankGroup: ...
def rank_group(runtime: Runtime, ranks: Any = None, **options: Any) -> JoinContext | RemoteRankGroup:
    """The rank group that this process is a rank of: `async with lz.rank_group(runtime, ranks, rank=...)`.

    With `build=`, one on the devices of the runtime's pool, led from this process. Options and errors as in
    `layerzero.actors.group.join.join_rank_group` and `layerzero.actors.group.cluster.remote_rank_group`.
    """
    if "build" in options:
        return remote_rank_group(runtime, ranks, **options)
    return join_rank_group(runtime, ranks, **options)
