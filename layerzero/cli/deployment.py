"""Consistency of a deployment: do all devices of a cluster have, choose, compute and batch the same?

A manifest names the calls that matter. Every device makes them ready, then answers for itself; devices on
equal hardware must agree in everything, others in versions and, within tolerance, in numbers. Numbers are
compared bit for bit only where one kernel gave them; the report says which were.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import click
import msgspec
import torch
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import InvalidVersion

from layerzero._util import log
from layerzero.actors.device.local_device import LocalDevice
from layerzero.actors.remote.pool import DevicePool, on_each
from layerzero.actors.rpc.client import DeviceFacts
from layerzero.actors.rpc.identity import kernels_digest
from layerzero.api.start import start
from layerzero.calls.awaited import awaitable
from layerzero.calls.blocking import context_runtime, last_selection
from layerzero.cli.common import call_arguments
from layerzero.ops import table as ops_table
from layerzero.ops.op import Args, Op
from layerzero.selection.plan import load_until_best, signature_of
from layerzero.spec.errors import ConfigurationError, LayerZeroError
from layerzero.spec.settings import Settings
from layerzero.spec.tolerances import mismatches
from layerzero.spec.user_file import UserFile

FORMAT_VERSION = 1
SEED = 20_26
ROWS = 8
_EPS = 1e-6
_BATCHED = "batched rows"


class DeploymentCall(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One call of the manifest: the op, and its arguments in the words that `lz explain` takes."""

    op: str
    arguments: tuple[str, ...] = ()

    def __str__(self) -> str:
        return " ".join((self.op, *self.arguments))


class Deployment(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a deployment promises: its calls, how many devices there are, which versions they have."""

    calls: tuple[DeploymentCall, ...]
    version: int = FORMAT_VERSION
    devices: int | None = None
    versions: dict[str, str] = {}


class DeploymentMismatch(msgspec.Struct, frozen=True):
    """One disagreement: the check, what it is about, each device's value, and what to do."""

    check: str
    about: str
    values: dict[str, str]
    advice: str


class ConsistencyReport(msgspec.Struct, frozen=True, kw_only=True):
    """What was compared over which devices; `ok` where nothing disagrees.

    `numbers` says of each kind of hardware and call whether outputs were compared bit for bit.
    """

    devices: tuple[DeviceFacts, ...]
    compared: dict[str, int]
    findings: tuple[DeploymentMismatch, ...]
    numbers: dict[str, dict[str, str]]

    @property
    def ok(self) -> bool:
        """Whether everything agrees."""
        return not self.findings


class CallResult(msgspec.Struct, frozen=True):
    """What one device answers to one call: its kernel, its transforms, its output and the output's digest."""

    kernel: str
    transforms: str
    digest: str
    output: Any
    error: str = ""

    @property
    def chosen(self) -> str:
        """What computed the output; devices where it is equal owe each other equal bits."""
        return self.error or f"{self.kernel} {self.transforms}".strip()


class DeviceResults(msgspec.Struct, frozen=True):
    """What one device says of itself beyond its facts, once it is ready: `kernels` as in its facts."""

    policy: str
    settings: str
    kernels: str
    answers: tuple[CallResult, ...]
    order: tuple[int, ...]
    rows: CallResult


def load(path: str | Path) -> Deployment:
    """Read a manifest.

    Raises: ConfigurationError: it cannot be read, or says what no manifest says; file and line are named.
    """
    try:
        manifest = msgspec.convert(UserFile(path).value, Deployment)
    except msgspec.ValidationError as error:
        raise ConfigurationError(f"{path}: {error}") from error
    if manifest.version != FORMAT_VERSION:
        raise ConfigurationError(f"{path}: version needs {FORMAT_VERSION}, got {manifest.version}")
    for call in manifest.calls:
        try:
            call_arguments.build_call(ops_table.get(call.op), call.arguments)
        except (LayerZeroError, ValueError, TypeError, click.UsageError) as error:
            raise ConfigurationError(f"{path}: {call}: {error}") from error
    return manifest


async def examine(calls: Sequence[DeploymentCall]) -> DeviceResults:
    """What this device is set to, and what it answers to the calls; runs on each device."""
    runtime = context_runtime()
    device = runtime.device()
    real_calls = [(ops_table.get(call.op), _arguments(call, device.device)) for call in calls]
    norm = ops_table.get("rms_norm")
    rows = _rows(device.device)
    batches = [(norm, (torch.cat(rows[:count]), None, _EPS)) for count in range(1, ROWS + 1)]
    await anyio.to_thread.run_sync(_make_ready, device, [*real_calls, *batches])
    answers = tuple([_answer(device, op, args) for op, args in real_calls])
    order, batched = await _run_batched_rows(device.device)
    settings = msgspec.json.encode(runtime.settings, order="deterministic")
    return DeviceResults(
        runtime.policy.digest, _digest(settings), kernels_digest(device), answers, order, batched
    )


def _make_ready(device: LocalDevice, calls: Sequence[tuple[Op, Args]]) -> None:
    """Read the measurements and load what would serve the calls better: no choice changes afterwards."""
    device.wait_for_costs()
    if device.settings.warm == "off":
        return  # what is never loaded cannot come in between either
    for op, args in calls:
        try:
            _load_best(device, op, args)
        except LayerZeroError as error:
            log.debug("consistency.not_ready", op=op.name, error=str(error))  # the call's answer says so too


def _load_best(device: LocalDevice, op: Op, args: Args) -> None:
    signature = signature_of(op, args)
    load_until_best(lambda: device.plan(op, signature, args, device.mode()).selection, device.warm)


def _arguments(call: DeploymentCall, device: torch.device) -> Args:
    """The call's arguments on a device, with values that only the seed decides."""
    _, args = call_arguments.build_call(ops_table.get(call.op), call.arguments)
    generator = torch.Generator().manual_seed(SEED)
    return tuple([_real(value, generator, device) for value in args])


def _answer(device: LocalDevice, op: Op, args: Args) -> CallResult:
    try:
        result, plan = device.launch_planned(op, args)
    except Exception as error:
        return CallResult("", "", "", None, f"{type(error).__name__}: {error}")
    flat = _first(result).detach().cpu().contiguous()
    return CallResult(
        plan.kernel, ", ".join(map(str, plan.selection.transforms)), _digest(_bytes(flat)), flat
    )


def _real(value: Any, generator: torch.Generator, device: torch.device) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    if value.dtype.is_floating_point:
        tensor = torch.randn(value.shape, generator=generator).to(value.dtype)
    elif value.dtype is torch.bool:
        tensor = torch.ones(value.shape, dtype=torch.bool)
    else:
        tensor = torch.zeros(value.shape, dtype=value.dtype)
    return tensor.to(device)


def _rows(device: torch.device) -> list[torch.Tensor]:
    """The rows (1, 64) that are submitted together."""
    generator = torch.Generator().manual_seed(SEED)
    return [torch.randn(1, 64, generator=generator).to(device) for _ in range(ROWS)]


async def _run_batched_rows(device: torch.device) -> tuple[tuple[int, ...], CallResult]:
    """The order in which rows that were submitted together come back, and what they got."""
    norm, rows = awaitable(ops_table.get("rms_norm")), _rows(device)
    ended: list[int] = []
    ran: list[str] = [""] * ROWS
    values: list[torch.Tensor] = [torch.empty(0)] * ROWS

    async def one(index: int) -> None:
        values[index] = await norm(rows[index], eps=_EPS)
        selection = last_selection()
        if selection is not None:
            ran[index] = f"{selection.kernel} of {selection.request.dims.get('N', 1)} rows"
        ended.append(index)

    async with anyio.create_task_group() as tasks:
        for index in range(ROWS):
            tasks.start_soon(one, index)
    joined = torch.cat([value.detach().cpu() for value in values]).contiguous()
    return tuple(ended), CallResult(", ".join(dict.fromkeys(ran)), "", _digest(_bytes(joined)), joined)


def _bytes(flat: torch.Tensor) -> bytes:
    return flat.view(-1).view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


async def check(manifest: Deployment, settings: Settings) -> ConsistencyReport:
    """Examine every device of the pool that `settings` open, and compare.

    Raises: ConfigurationError, DeviceLostError: the cluster cannot be joined, or a device was lost.
    """
    async with start(settings, scoped=True) as runtime:
        return await check_pool(manifest, runtime.device_pool)


async def check_pool(manifest: Deployment, device_pool: DevicePool) -> ConsistencyReport:
    """Examine every device of an open pool, and compare.

    Raises: DeviceLostError: a device was lost meanwhile.
    """
    examined = await on_each(
        device_pool.devices.values(), lambda device: device_pool.run(examine, manifest.calls, on=device)
    )
    facts = {fact.name: fact for fact in device_pool.facts}
    return compare(manifest, facts, examined)


def compare(
    manifest: Deployment, facts: Mapping[str, DeviceFacts], examined: Mapping[str, DeviceResults]
) -> ConsistencyReport:
    """The disagreements between devices; pure, so that any deployment can be compared anywhere."""
    findings: list[DeploymentMismatch] = []
    if manifest.devices is not None and manifest.devices != len(facts):
        counted = {name: fact.node for name, fact in facts.items()}
        about = f"{manifest.devices} promised, {len(facts)} there"
        findings.append(DeploymentMismatch("devices", about, counted, "add what is missing"))
    findings += _versions(manifest, facts)
    alike: dict[str, list[str]] = {}
    for name, fact in facts.items():
        alike.setdefault(f"{fact.hardware.platform}: {fact.hardware.name}", []).append(name)
    numbers: dict[str, dict[str, str]] = {}
    for kind, names in alike.items():
        findings += _compare_kind(names, examined)
        numbers[kind] = {}
        for about, answers in _outputs(manifest, names, examined):
            numbers[kind][about], differences = _bits(about, answers)
            findings += differences
    findings += _numerics(manifest, list(facts), examined)
    compared = {
        "devices": len(facts),
        "kinds of hardware": len(alike),
        "calls": len(manifest.calls),
        "versions": len({v for fact in facts.values() for v in fact.versions}),
    }
    return ConsistencyReport(
        devices=tuple(facts.values()), compared=compared, findings=tuple(findings), numbers=numbers
    )


def _versions(manifest: Deployment, facts: Mapping[str, DeviceFacts]) -> Iterator[DeploymentMismatch]:
    for library in sorted({v for fact in facts.values() for v in fact.versions} | set(manifest.versions)):
        have = {name: fact.versions.get(library, "missing") for name, fact in facts.items()}
        promised = manifest.versions.get(library)
        if len(set(have.values())) > 1:
            yield DeploymentMismatch("versions", library, have, "install one version on every node")
        elif promised is not None and not all(_keeps_promise(promised, version) for version in have.values()):
            about = f"{library}, {promised} promised"
            yield DeploymentMismatch("versions", about, have, "install what is promised")


def _keeps_promise(promise: str, version: str) -> bool:
    """Whether a version is the promised one, as PEP 440 has it: a promise of 2.13.0 is kept by 2.13.0+cpu."""
    try:
        return SpecifierSet(f"=={promise}").contains(version, prereleases=True)
    except (InvalidSpecifier, InvalidVersion):
        return promise == version


def _compare_kind(
    names: Sequence[str], examined: Mapping[str, DeviceResults]
) -> Iterator[DeploymentMismatch]:
    """What devices of one kind of hardware must have in common."""
    for what, values, advice in (
        ("kernels", {n: examined[n].kernels for n in names}, "compare `lz kernels` on the nodes"),
        ("policy", {n: examined[n].policy for n in names}, "give every node the same policy file"),
        ("settings", {n: examined[n].settings for n in names}, "compare LAYERZERO_* on the nodes"),
        ("batch order", {n: str(examined[n].order) for n in names}, "compare versions and settings"),
    ):
        if len(set(values.values())) > 1:
            yield DeploymentMismatch(what, "all devices of one kind", values, advice)


def _outputs(
    manifest: Deployment, names: Sequence[str], examined: Mapping[str, DeviceResults]
) -> list[tuple[str, dict[str, CallResult]]]:
    """What devices answered, call by call, and last the rows that were submitted together."""
    calls = [
        (str(call), {n: examined[n].answers[index] for n in names})
        for index, call in enumerate(manifest.calls)
    ]
    return [*calls, (_BATCHED, {n: examined[n].rows for n in names})]


def _bits(about: str, answers: Mapping[str, CallResult]) -> tuple[str, list[DeploymentMismatch]]:
    """How the outputs of devices of one kind were compared, and what differs: bits only under one kernel."""
    chosen = {n: a.chosen for n, a in answers.items()}
    if len(set(chosen.values())) > 1:
        how = "within tolerance: " + "; ".join(f"{n} ran {what}" for n, what in chosen.items())
        advice = "one node measured or quarantined what others did not: `lz doctor`, lock the kernel, or tune"
        return how, [] if about == _BATCHED else [DeploymentMismatch("plans", about, chosen, advice)]
    how = f"bit for bit, under {next(iter(chosen.values()), 'nothing')}"
    digests = {n: a.digest for n, a in answers.items()}
    if len(set(digests.values())) == 1:
        return how, []
    check = _BATCHED if about == _BATCHED else "numerics"
    return how, [
        DeploymentMismatch(check, f"{about}: bits", digests, "same kernel, other bits: suspect the device")
    ]


def _numerics(
    manifest: Deployment, names: Sequence[str], examined: Mapping[str, DeviceResults]
) -> Iterator[DeploymentMismatch]:
    """Outputs compared with the float64 reference, on whatever hardware."""
    cpu = torch.device("cpu")
    norm = ops_table.get("rms_norm")
    real_calls = [(ops_table.get(call.op), _arguments(call, cpu)) for call in manifest.calls]
    real_calls.append((norm, (torch.cat(_rows(cpu)), None, _EPS)))
    for (about, answers), (op, real) in zip(_outputs(manifest, names, examined), real_calls, strict=True):
        exact = [v.double() if isinstance(v, torch.Tensor) and v.dtype.is_floating_point else v for v in real]
        truth, baseline = _first(op.reference(*exact)), _first(op.reference(*real))
        wrong: dict[str, str] = {}
        for name, answer in answers.items():
            problems = [answer.error] if answer.error else mismatches(answer.output, truth, baseline)
            if problems:
                wrong[name] = "; ".join(problems)
        if wrong:
            yield DeploymentMismatch("numerics", about, wrong, "quarantine the kernel there: it is wrong")


def _first(result: Any) -> torch.Tensor:
    first: torch.Tensor = result[0] if isinstance(result, tuple) else result
    return first
