"""Opening a device of a runtime, and putting other settings in force on it: kernels, prices, batchers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch

from layerzero._util import log
from layerzero.actors.device.registry import Registry
from layerzero.backends import availability, load_builtin
from layerzero.health import JsonQuarantineStore
from layerzero.scheduler.scheduled_device import ScheduledDevice
from layerzero.selection.cost.cost_model import has_measurements, load_costs
from layerzero.spec.errors import ConfigurationError
from layerzero.spec.hardware import probe
from layerzero.spec.kernel import Kernel
from layerzero.spec.settings import Settings

if TYPE_CHECKING:
    from layerzero.actors.isolation.isolated_kernels import IsolatedBackends
    from layerzero.observe.counters import Counters
    from layerzero.selection.active_table import ActiveDispatchTable
    from layerzero.spec.capability_overlays import Overlay

ISOLATES_NOTHING = "isolation.matches_nothing"
NEEDS = "globs over ids and backends of kernels"
# What a device's prices are read by.
COST_SETTINGS = ("perfdb", "perfdb_days", "shipped_tables", "state_dir")


def open_device(
    device: torch.device,
    settings: Settings,
    kernels: Callable[[], list[Kernel]],
    added: Iterable[Kernel],
    overlay: Overlay | None,
    isolation: IsolatedBackends | None = None,
    **parts: Any,
) -> ScheduledDevice:
    """A device with its kernels, prices and batchers; `parts` go to its constructor.

    `kernels` gives what there is, `added` comes beside it; `overlay` takes away from both what the deployment
    does not want; `isolation` has those of them that run in processes of their own.
    """
    digest = overlay.digest if overlay is not None else ""
    prepare = None if isolation is None else isolation.prepared

    def with_overlay(all_kernels: Iterable[Kernel]) -> list[Kernel]:
        return list(all_kernels) if overlay is None else list(map(overlay.apply, all_kernels))

    if kernels is load_builtin:
        platform = device.type

        def source(op: str, every: bool) -> list[Kernel]:
            return with_overlay(load_builtin(op=op, platform=None if every else platform))

        registry = Registry((), availability, source, digest, prepare)
    else:
        registry = Registry(with_overlay(kernels()), availability, None, digest, prepare)
    for kernel in with_overlay(added):
        registry.add(kernel)
    opened = ScheduledDevice(device, settings, registry, hardware=probe(device), **parts)
    if isolation is not None:
        isolation.attach(opened)
        for pattern, place in isolation.unmatched(registry.all()).items():
            log.warning(ISOLATES_NOTHING, variable="LAYERZERO_ISOLATE", needs=NEEDS, got=f"{pattern}={place}")
    if has_measurements(settings, opened.hardware):
        _load_costs(opened, at_once=settings.warm != "background")
    if settings.warm == "eager":
        _load_all(opened)
    return opened


def open_isolation(
    settings: Settings, counters: Counters, on_close: Callable[[Callable[[], None]], None]
) -> IsolatedBackends | None:
    """The backends in processes of their own; nothing is imported where the settings have none."""
    if not settings.isolate and not any("@" in name for name in settings.plugins):
        return None
    from layerzero.actors.isolation.isolated_kernels import IsolatedBackends

    isolation = IsolatedBackends(settings, counters)
    on_close(isolation.close)
    return isolation


def apply_settings(device: ScheduledDevice, settings: Settings, solved: ActiveDispatchTable | None) -> None:
    """Put other settings in force on an open device, and `solved`, what `dispatch_table_for` made of them."""
    before = device.settings
    device.set_settings(settings, solved)
    if any(getattr(settings, name) != getattr(before, name) for name in COST_SETTINGS):
        _load_costs(device, at_once=False)  # the caller may be in an event loop
    if settings.warm == "eager" != before.warm:
        _load_all(device)


def move_state(devices: Iterable[ScheduledDevice], folder: str | None) -> JsonQuarantineStore | None:
    """Have devices remember in another folder, with what they know already; its store of quarantines.

    Raises: ConfigurationError: it cannot be read or written; they keep the old one.
    """
    from layerzero.graphs.proof import ProofStore

    store, proofs = JsonQuarantineStore(folder) if folder is not None else None, ProofStore.within(folder)
    opened = list(devices)
    try:
        for device in opened:
            device.health.copy_to(store)
            device.proofs.copy_to(proofs)
        for device in opened:
            device.health.adopt(store)
            device.proofs.adopt(proofs)
    except OSError as error:
        message = f"state_dir needs a folder that can be read and written, got {folder}: {error}"
        raise ConfigurationError(message, field="state_dir") from error
    return store


def _load_costs(device: ScheduledDevice, *, at_once: bool) -> None:
    settings = device.settings

    def costs() -> Any:
        # Asking which kernels there are imports what a first call can do without: in the background, too.
        kernels = {kernel.id: kernel for kernel in device.registry.all()}
        return load_costs(settings, kernels, device.hardware, device.measured)

    device.load_costs(costs, at_once=at_once)


def _load_all(device: ScheduledDevice) -> None:
    """Load every kernel that the device may choose: others would import and compile, and never run."""
    registry, platform, policy = device.registry, device.hardware.platform, device.snapshot.policy
    fitting = {
        kernel.id
        for kernel in registry.all()
        if platform in kernel.capability.platforms
        and not policy.always_denies(kernel.id, kernel.backend, kernel.op)
    }
    device.warm(sorted(registry.unready() & fitting - registry.blocked().keys()))
