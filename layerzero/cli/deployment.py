"""Consistency of a deployment: do all devices of a cluster have, choose, compute and batch the same?

A manifest names the calls that matter. Every device answers for itself; devices on equal hardware must agree
in everything, others in versions and, within tolerance, in numbers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import anyio
import click
import msgspec
import torch

from layerzero.actors.fleet import Fleet
from layerzero.actors.port import DeviceFacts
from layerzero.api.awaiting import awaited
from layerzero.api.start import start
from layerzero.cli import spec
from layerzero.dispatch import positional
from layerzero.errors import ConfigurationError, LayerZeroError
from layerzero.ops import table as ops_table
from layerzero.runtime import current
from layerzero.settings import Settings
from layerzero.strict_yaml import MAX_BYTES, YamlError, parse
from layerzero.tolerances import disagreements

FORMAT_VERSION = 1
SEED = 20_26
ROWS = 8


class Call(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One call of the manifest: the op, and its arguments in the words that `lz explain` takes."""

    op: str
    arguments: tuple[str, ...] = ()

    def __str__(self) -> str:
        return " ".join((self.op, *self.arguments))


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a deployment promises: its calls, how many devices there are, which versions they have."""

    calls: tuple[Call, ...]
    version: int = FORMAT_VERSION
    devices: int | None = None
    versions: dict[str, str] = {}


class Finding(msgspec.Struct, frozen=True):
    """One disagreement: the check, what it is about, each device's value, and what to do."""

    check: str
    about: str
    values: dict[str, str]
    advice: str


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What was compared over which devices; `ok` where nothing disagrees."""

    devices: tuple[DeviceFacts, ...]
    compared: dict[str, int]
    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        """Whether everything agrees."""
        return not self.findings


class Answer(msgspec.Struct, frozen=True):
    """What one device answers to one call: its kernel, its transforms, its output and the output's digest."""

    kernel: str
    transforms: str
    digest: str
    output: Any
    error: str = ""


class Examined(msgspec.Struct, frozen=True):
    """What one device says of itself beyond its facts."""

    policy: str
    settings: str
    answers: tuple[Answer, ...]
    order: tuple[int, ...]
    rows: str


def load(path: str | Path) -> Manifest:
    """Read a manifest.

    Raises: ConfigurationError: it cannot be read, or says what no manifest says; file and line are named.
    """
    try:
        data = Path(path).read_bytes()[: MAX_BYTES + 1]
        document = parse(data)
        manifest = msgspec.convert(document.value, Manifest)
    except OSError as error:
        raise ConfigurationError(f"{path}: cannot be read: {error.strerror}") from error
    except YamlError as error:
        raise ConfigurationError(f"{path}:{error.line or 1}: {error}") from error
    except msgspec.ValidationError as error:
        raise ConfigurationError(f"{path}: {error}") from error
    if manifest.version != FORMAT_VERSION:
        raise ConfigurationError(f"{path}: version needs {FORMAT_VERSION}, got {manifest.version}")
    for call in manifest.calls:
        try:
            spec.built(ops_table.get(call.op), call.arguments)
        except (LayerZeroError, ValueError, TypeError, click.UsageError) as error:
            raise ConfigurationError(f"{path}: {call}: {error}") from error
    return manifest


async def examine(calls: Sequence[Call]) -> Examined:
    """What this device is set to, and what it answers to the calls; runs on each device."""
    runtime = current()
    answers = tuple([_answer(call) for call in calls])
    order, rows = await _batched()
    settings = msgspec.json.encode(runtime.settings, order="deterministic")
    return Examined(runtime.policy.digest, _digest(settings), answers, order, rows)


def _answer(call: Call) -> Answer:
    op = ops_table.get(call.op)
    _, args = spec.built(op, call.arguments)
    generator = torch.Generator().manual_seed(SEED)
    device = current().device().device
    real = [_real(value, generator, device) for value in args]
    try:
        result = current().device().launch(op, tuple(real))
    except Exception as error:
        return Answer("", "", "", None, f"{type(error).__name__}: {error}")
    selection = current().device().plan(op, positional(op, real), tuple(real), 0).record()
    first = result[0] if isinstance(result, tuple) else result
    flat = first.detach().cpu().contiguous()
    data = flat.view(-1).view(torch.uint8).numpy().tobytes() if flat.numel() else b""
    transforms = ", ".join(map(str, selection.transforms))
    return Answer(selection.kernel, transforms, _digest(data), flat)


def _real(value: Any, generator: torch.Generator, device: torch.device) -> Any:
    """A tensor of the call with values that only the seed decides."""
    if not isinstance(value, torch.Tensor):
        return value
    if value.dtype.is_floating_point:
        made = torch.randn(value.shape, generator=generator).to(value.dtype)
    elif value.dtype is torch.bool:
        made = torch.ones(value.shape, dtype=torch.bool)
    else:
        made = torch.zeros(value.shape, dtype=value.dtype)
    return made.to(device)


async def _batched() -> tuple[tuple[int, ...], str]:
    """The order in which rows that were submitted together come back, and a digest of what they got."""
    norm = awaited(ops_table.get("rms_norm"))
    generator = torch.Generator().manual_seed(SEED)
    device = current().device().device
    rows = [torch.randn(1, 64, generator=generator).to(device) for _ in range(ROWS)]
    ended: list[int] = []
    values: list[torch.Tensor] = [torch.empty(0)] * ROWS

    async def one(index: int) -> None:
        values[index] = await norm(rows[index])
        ended.append(index)

    async with anyio.create_task_group() as tasks:
        for index in range(ROWS):
            tasks.start_soon(one, index)
    joined = torch.cat([value.detach().cpu() for value in values]).contiguous()
    return tuple(ended), _digest(joined.view(torch.uint8).numpy().tobytes())


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


async def check(manifest: Manifest, settings: Settings) -> Report:
    """Examine every device of the fleet that `settings` open, and compare.

    Raises: ConfigurationError, DeviceLostError: the cluster cannot be joined, or a device was lost.
    """
    async with start(settings, scoped=True) as runtime:
        return await check_fleet(manifest, runtime.fleet)


async def check_fleet(manifest: Manifest, fleet: Fleet) -> Report:
    """Examine every device of an open fleet, and compare."""
    examined: dict[str, Examined] = {}

    async def one(name: str) -> None:
        examined[name] = await fleet.run(examine, manifest.calls, on=name)

    async with anyio.create_task_group() as tasks:
        for name in fleet.devices:
            tasks.start_soon(one, name)
    facts = {fact.name: fact for fact in fleet.facts}
    return compare(manifest, facts, examined)


def compare(manifest: Manifest, facts: Mapping[str, DeviceFacts], examined: Mapping[str, Examined]) -> Report:
    """The disagreements between devices; pure, so that any deployment can be compared anywhere."""
    found: list[Finding] = []
    if manifest.devices is not None and manifest.devices != len(facts):
        counted = {name: fact.node for name, fact in facts.items()}
        found.append(
            Finding(
                "devices", f"{manifest.devices} promised, {len(facts)} there", counted, "add what is missing"
            )
        )
    found += _versions(manifest, facts)
    alike: dict[str, list[str]] = {}
    for name, fact in facts.items():
        alike.setdefault(f"{fact.hardware.platform}: {fact.hardware.name}", []).append(name)
    for names in alike.values():
        found += _group(manifest, names, facts, examined)
    found += _numerics(manifest, list(facts), examined)
    compared = {
        "devices": len(facts),
        "kinds of hardware": len(alike),
        "calls": len(manifest.calls),
        "versions": len({v for fact in facts.values() for v in fact.versions}),
    }
    return Report(devices=tuple(facts.values()), compared=compared, findings=tuple(found))


def _versions(manifest: Manifest, facts: Mapping[str, DeviceFacts]) -> list[Finding]:
    found = []
    for library in sorted({v for fact in facts.values() for v in fact.versions} | set(manifest.versions)):
        have = {name: fact.versions.get(library, "missing") for name, fact in facts.items()}
        wanted = manifest.versions.get(library)
        if len(set(have.values())) > 1:
            found.append(Finding("versions", library, have, "install one version on every node"))
        elif wanted is not None and set(have.values()) != {wanted}:
            found.append(
                Finding("versions", f"{library}, {wanted} promised", have, "install what is promised")
            )
    return found


def _group(
    manifest: Manifest,
    names: Sequence[str],
    facts: Mapping[str, DeviceFacts],
    examined: Mapping[str, Examined],
) -> list[Finding]:
    """What devices of one kind of hardware must have in common."""
    found = []
    for what, values, advice in (
        ("kernels", {n: facts[n].kernels for n in names}, "compare `lz kernels` on the nodes"),
        ("policy", {n: examined[n].policy for n in names}, "give every node the same policy file"),
        ("settings", {n: examined[n].settings for n in names}, "compare LAYERZERO_* on the nodes"),
        ("batch order", {n: str(examined[n].order) for n in names}, "compare versions and settings"),
        ("batched rows", {n: examined[n].rows for n in names}, "see the numerics below"),
    ):
        if len(set(values.values())) > 1:
            found.append(Finding(what, "all devices of one kind", values, advice))
    for index, call in enumerate(manifest.calls):
        answers = {n: examined[n].answers[index] for n in names}
        chosen = {n: a.error or f"{a.kernel} {a.transforms}".strip() for n, a in answers.items()}
        if len(set(chosen.values())) > 1:
            advice = (
                "one node measured or quarantined what others did not: `lz doctor`, lock the kernel, or tune"
            )
            found.append(Finding("plans", str(call), chosen, advice))
        elif len({a.digest for a in answers.values()}) > 1:
            digests = {n: a.digest for n, a in answers.items()}
            found.append(
                Finding("numerics", f"{call}: bits", digests, "same kernel, other bits: suspect the device")
            )
    return found


def _numerics(manifest: Manifest, names: Sequence[str], examined: Mapping[str, Examined]) -> list[Finding]:
    """Outputs compared with the float64 reference, on whatever hardware."""
    found = []
    for index, call in enumerate(manifest.calls):
        op = ops_table.get(call.op)
        _, args = spec.built(op, call.arguments)
        generator = torch.Generator().manual_seed(SEED)
        cpu = torch.device("cpu")
        real = [_real(value, generator, cpu) for value in args]
        exact = [v.double() if isinstance(v, torch.Tensor) and v.dtype.is_floating_point else v for v in real]
        truth, baseline = _first(op.reference(*exact)), _first(op.reference(*real))
        wrong: dict[str, str] = {}
        for name in names:
            answer = examined[name].answers[index]
            problems = [answer.error] if answer.error else disagreements(answer.output, truth, baseline)
            if problems:
                wrong[name] = "; ".join(problems)
        if wrong:
            found.append(Finding("numerics", str(call), wrong, "quarantine the kernel there: it is wrong"))
    return found


def _first(result: Any) -> torch.Tensor:
    first: torch.Tensor = result[0] if isinstance(result, tuple) else result
    return first
