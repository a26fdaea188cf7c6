"""Every module of a model with the op that serves it, in place and back."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from layerzero.integrations.patches import disentangled, mlp, norm, rope, sdpa
from layerzero.integrations.patches.substitute import (
    PARTS,
    SUBSTITUTE,
    PatchedForward,
    PatchTable,
    Verdicts,
    is_taken,
)

RECORD = "_layerzero_patch"
# Such as accelerate, which puts a module's weights where they are needed just before.
TAKEN = "another library has replaced its forward"
# Of each part: which modules belong to it, and the substitute of one or why it has none.
_KINDS: dict[str, tuple[Callable[[nn.Module], bool], Callable[[nn.Module], PatchedForward | str]]] = {
    "norm": (norm.is_norm, norm.substitute),
    "mlp": (mlp.is_mlp, mlp.substitute),
    "attention": (disentangled.is_disentangled, disentangled.substitute),
}


@dataclass
class Patch:
    """What was done to one model, kept in it, so that a copy of the model has its own."""

    table: PatchTable
    parts: frozenset[str]
    substitutes: list[PatchedForward] = field(default_factory=list)
    # What was set in configurations and other such things: (object, attribute, value before, value).
    settings: list[tuple[Any, str, Any, Any]] = field(default_factory=list)

    def set(self, owner: Any, name: str, before: Any, value: Any) -> None:
        """Set an attribute until `restore_settings`."""
        self.settings.append((owner, name, before, value))
        setattr(owner, name, value)

    def restore_settings(self) -> None:
        """Give every object the attribute back that it had, unless another one was set since."""
        for owner, name, before, value in self.settings:
            if getattr(owner, name) == value:
                setattr(owner, name, before)
        self.settings.clear()


def need_parts(parts: Iterable[str]) -> frozenset[str]:
    """The parts to patch.

    Raises: ValueError: one of them is none that a model has.
    """
    if isinstance(parts, str):
        raise ValueError(f"parts needs a collection of names, got the string {parts!r}")
    names = frozenset(parts)
    strange = sorted(names - set(PARTS), key=str)
    if strange or not names:
        raise ValueError(f"parts needs some of {', '.join(PARTS)}, got {strange[0] if strange else 'none'!r}")
    return names


def substitutes(model: nn.Module, parts: Iterable[str], verdicts: Verdicts) -> list[PatchedForward]:
    """The substitute of each module that an op serves, not yet in place; every module gets a verdict."""
    chosen: list[PatchedForward] = []
    kinds = [_KINDS[part] + (part,) for part in parts if part in _KINDS]
    for module in model.modules():
        for belongs, make, part in kinds:
            if not belongs(module):
                continue
            verdict = TAKEN if is_taken(module) else make(module)
            if isinstance(verdict, str):
                verdicts.add(part, module, None, verdict)
            else:
                verdicts.add(part, module, verdict.op, verdict.note)
                chosen.append(verdict)
        if "rope" in parts and (tables := rope.tables_substitute(module)) is not None:
            chosen.append(tables)
        rewired = _rewired(module, parts, verdicts)
        if rewired:
            chosen.append(rope.AttentionForward(module, rewired))
    return chosen


def _rewired(module: nn.Module, parts: Iterable[str], verdicts: Verdicts) -> frozenset[str]:
    """The parts of a module's own forward that are functions which it calls, and ops of ours can be."""
    verdict_by_part: dict[str, tuple[str | None, str]] = {}
    if "rope" in parts and rope.turns(module):
        verdict_by_part["rope"] = rope.verdict(module)
    if "attention" in parts and calls_attention(module):
        verdict_by_part["attention"] = "attention", ""
    if is_taken(module):
        verdict_by_part = dict.fromkeys(verdict_by_part, (None, TAKEN))
    for part, (op, why) in verdict_by_part.items():
        verdicts.add(part, module, op, why)
    return frozenset(part for part, (op, _) in verdict_by_part.items() if op is not None)


def calls_attention(module: nn.Module) -> bool:
    """Whether a module's forward calls torch's attention by itself."""
    return bool(sdpa.replacements(type(module).forward))


def has_own_attention(module: nn.Module) -> bool:
    """Whether a module computes attention in a way of its own that a substitute serves."""
    return calls_attention(module) or disentangled.is_disentangled(module)


def record_of(model: nn.Module) -> Patch | None:
    """What was done to this model, None if nothing."""
    record: Patch | None = model.__dict__.get(RECORD)
    return record


def has_record(model: nn.Module, parts: frozenset[str]) -> bool:
    """Whether this model is patched, with these parts.

    Raises: ValueError: it is, without some of them.
    """
    record = record_of(model)
    missing = sorted(parts - record.parts) if record is not None else []
    if record is not None and missing:
        served = ", ".join(sorted(record.parts))
        raise ValueError(
            f"model needs to be unpatched first to patch {missing[0]}: it is patched for {served}"
        )
    return record is not None


def apply(model: nn.Module, patch: Patch) -> None:
    """Put every substitute in place and remember it."""
    for substitute in patch.substitutes:
        substitute.install()
    model.__dict__[RECORD] = patch


def restore(model: nn.Module, patch: Patch) -> None:
    """Give every module and configuration back what it had."""
    for substitute in reversed(patch.substitutes):
        substitute.remove()
    for copied in _copies(model):
        copied.remove()
    patch.restore_settings()
    del model.__dict__[RECORD]


def _copies(model: nn.Module) -> list[PatchedForward]:
    """Substitutes that came with copies of modules, as PEFT keeps some: those of no other patched model."""
    others = [root for root in model.modules() if root is not model and record_of(root) is not None]
    theirs = {part for root in others for part in root.modules()}
    here = (part for part in model.modules() if SUBSTITUTE in part.__dict__ and part not in theirs)
    return [part.__dict__[SUBSTITUTE] for part in here]
