"""Plans as a file: what was chosen for each block, read again only where it still holds."""

from __future__ import annotations

import os
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import msgspec

from layerzero._util import log
from layerzero._util.files import decode_json, read_given
from layerzero.actors.device.local_device import LocalDevice
from layerzero.perfdb.record import Environment
from layerzero.perfdb.table_file import content_hash, write_table_file
from layerzero.planner.choices import Choices
from layerzero.planner.search import CoverOption, Solution
from layerzero.planner.values import PlacedBlock
from layerzero.selection.dispatch_table import capabilities_hash
from layerzero.spec.errors import PlanRefusedError
from layerzero.spec.reasons import Reason, Rejected

FORMAT = 1
NOT_FOLLOWED = "plan.file_not_followed"


class SavedStep(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One step: the places of the ops that it covers, its kernel, its values with dtype and strides."""

    covers: tuple[int, ...]
    kernel: str
    formats: tuple[tuple[int, str, tuple[int, ...]], ...]


class SavedPlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The steps for one block under these modes; `block` is the block's digest, `policy` the policy's."""

    block: str
    modes: int
    policy: str
    expected_us: float
    exact: bool
    steps: tuple[SavedStep, ...]

    @classmethod
    def of(cls, block: str, modes: int, solution: Solution, expected_us: float, policy: str) -> SavedPlan:
        """A solution as it is written."""
        steps = tuple(
            SavedStep(tuple(sorted(each.covers)), each.payload.kernel, _formats(each))
            for each in solution.alternatives
        )
        return cls(block, modes, policy, round(expected_us, 3), solution.exact, steps)


class PlanFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Plans with what they hold for; `content` is the hash of the plans.

    `hardware` is the machine; `policy` and `capabilities`, every kernel's limits, are digests.
    """

    format: int = FORMAT
    date: str
    hardware: Environment
    policy: str
    capabilities: str
    content: str
    plans: tuple[SavedPlan, ...]


def _formats(alternative: CoverOption) -> tuple[tuple[int, str, tuple[int, ...]], ...]:
    return tuple((value, *form) for value, form in sorted(alternative.payload.formats.items()))


def save_plans(
    path: str | os.PathLike[str], plans: tuple[SavedPlan, ...], device: LocalDevice, policy: str
) -> None:
    """Write plans, whole or not at all.

    Raises: FileExistsError: `path` is another kind of file.
    """
    table = PlanFile(
        date=datetime.now(UTC).date().isoformat(),
        hardware=Environment.of_hardware(device.hardware),
        policy=policy,
        capabilities=capabilities_hash(device.registry.all()),
        content=content_hash(plans),
        plans=plans,
    )
    write_table_file(Path(path), table, "plans")


def read_plans(path: str | os.PathLike[str], device: LocalDevice, policy: str) -> tuple[SavedPlan, ...]:
    """The plans of a file that hold on a device under a policy.

    Raises: PlanRefusedError: they do not, with every reason. OSError: there is no such file.
    """
    text, refused = read_given(path), partial(PlanRefusedError.because, path)
    try:
        head = decode_json(text, object)
        stated = head.get("format") if isinstance(head, dict) and "plans" in head else None
        table = decode_json(text, PlanFile) if stated == FORMAT else None
    except (ValueError, msgspec.MsgspecError) as error:
        raise refused(Reason.PLAN_DAMAGED, "file", "JSON with every field", str(error)) from error
    if table is None:
        raise refused(Reason.PLAN_FORMAT, "format", str(FORMAT), str(stated))
    if content_hash(table.plans) != table.content:
        raise refused(Reason.PLAN_DAMAGED, "content", table.content[:12], content_hash(table.plans)[:12])
    problems = [
        Rejected(Reason.PLAN_ENVIRONMENT_DIFFERS, "hardware", "the machine at hand", difference)
        for difference in table.hardware.differences(Environment.of_hardware(device.hardware))
    ]
    capabilities = capabilities_hash(device.registry.all())
    if table.capabilities != capabilities:
        needs, got = capabilities[:12], table.capabilities[:12]
        problems.append(Rejected(Reason.PLAN_ENVIRONMENT_DIFFERS, "kernels and their limits", needs, got))
    for digest in sorted({plan.policy for plan in table.plans} - {policy}):
        problems.append(Rejected(Reason.PLAN_POLICY_DIFFERS, "policy", policy[:12], digest[:12]))
    if problems:
        raise PlanRefusedError.of(path, *problems)
    return table.plans


def refuse_block(path: str, block: str, plans: tuple[SavedPlan, ...]) -> PlanRefusedError:
    """The refusal of a file that has no plan for a block."""
    names = ", ".join(sorted({plan.block for plan in plans})) or "none"
    return PlanRefusedError.because(path, Reason.PLAN_BLOCK_DIFFERS, "block", block, names)


def chosen_before(
    saved: SavedPlan, choices: Choices, block: PlacedBlock, path: str, *, needed: bool
) -> Solution | None:
    """The solution that was saved, of what may be chosen now; None, and said, where it is none any more.

    Raises: PlanRefusedError: it is `needed`, and a kernel of it does not take its call.
    """
    by_step = {
        (tuple(sorted(each.covers)), each.payload.kernel, _formats(each)): each
        for each in choices.alternatives
    }
    problems = []
    chosen = []
    for step in saved.steps:
        alternative = by_step.get((step.covers, step.kernel, step.formats))
        if alternative is None:
            names = ", ".join(
                block.ops[place].written.name for place in step.covers if place < len(block.ops)
            )
            got = choices.why_not(step.kernel) or "it is not chosen for them now"
            problems.append(Rejected(Reason.PLAN_KERNEL_REFUSED, names, f"{step.kernel} to take them", got))
        else:
            chosen.append(alternative)
    if problems:
        refusal = PlanRefusedError.of(path, *problems)
        if needed:
            raise refusal
        log.warning(NOT_FOLLOWED, path=path, block=saved.block, why=str(refusal))
        return None
    return Solution(tuple(chosen), saved.expected_us, saved.exact)
