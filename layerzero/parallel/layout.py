"""Which rank has which part of a model: the ranks of one stage next to each other, stage behind stage."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from layerzero.parallel.tensor import TensorGroup
from layerzero.spec.errors import ConfigurationError

if TYPE_CHECKING:
    from layerzero.actors.group.join import RankHandle


class Layout:
    """The place of one rank among `pp` stages of `tp` ranks each; every rank of a rank group makes one.

    Rank r is rank r % tp of stage r // tp, `tensor` its stage's group. `chain` are the ranks with its number
    in all stages, and `returning` takes results from the last stage to rank 0, on the hosts: what comes back
    waits for nothing that goes out, and no receive waits on a GPU that computes. `sequence` is
    `TensorGroup`'s.

    Before the first collective the ranks compare their sizes and what `same` names, by name: a checkpoint's
    digest, a configuration's.

    Raises: ValueError: tp * pp is not the group's number of ranks. ConfigurationError: torch.distributed has
        no default group of these ranks. ConsistencyError, on every rank, with the
        reason RANKS_DIFFER: one has other sizes or another `same`.
    """

    def __init__(
        self,
        member: RankHandle,
        *,
        tp: int = 1,
        pp: int = 1,
        sequence: bool = False,
        same: Mapping[str, str] | None = None,
    ) -> None:
        if tp < 1 or pp < 1 or tp * pp != member.ranks:
            raise ValueError(f"tp * pp needs to be the rank group's {member.ranks} ranks, got {tp} * {pp}")
        member.need_same({"tp": str(tp), "pp": str(pp), "sequence": str(sequence), **(same or {})})
        if member.ranks > 1 and not _is_default_group(member):
            raise ConfigurationError(
                f"Layout needs a default group of torch.distributed with the {member.ranks} ranks in their "
                "order: torch.distributed.init_process_group()"
            )
        self.member, self.stages = member, pp
        self.stage, tensor_rank = divmod(member.rank, tp)
        rows = [range(stage * tp, (stage + 1) * tp) for stage in range(pp)]
        columns = [range(first, tp * pp, tp) for first in range(tp)]
        group = dist.group.WORLD if tp == member.ranks > 1 else _group_of(member.rank, rows if tp > 1 else [])
        self.tensor = TensorGroup(tensor_rank, tp, group, sequence=sequence)
        self.chain = _group_of(member.rank, columns if pp > 1 else [])
        # Of all ranks: where NCCL's default group is bound to a GPU, torch has those outside a group wait.
        self.returning: Any = dist.new_group(backend="gloo") if pp > 1 else None

    @property
    def first(self) -> bool:
        """Whether this is a rank of the first stage."""
        return self.stage == 0

    @property
    def last(self) -> bool:
        """Whether this is a rank of the last stage."""
        return self.stage == self.stages - 1

    def layers(self, count: int) -> range:
        """Which of `count` layers this stage has: as many as the others, or one more.

        Raises: ValueError: there are fewer layers than stages.
        """
        if self.stages > count:
            raise ValueError(f"pp needs 1 to {count} stages, one layer each at least, got {self.stages}")
        return range(self.stage * count // self.stages, (self.stage + 1) * count // self.stages)


def _is_default_group(member: RankHandle) -> bool:
    return dist.is_initialized() and (dist.get_rank(), dist.get_world_size()) == (member.rank, member.ranks)


def _group_of(rank: int, groups: list[range]) -> dist.ProcessGroup | None:
    """The one of `groups` that has `rank`; every rank makes all of them, as torch.distributed needs it."""
    process_groups: list[Any] = [dist.new_group(list(ranks)) for ranks in groups]
    return next((group for group, ranks in zip(process_groups, groups, strict=True) if rank in ranks), None)
