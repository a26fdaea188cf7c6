"""What a device says about itself: its hardware, the versions under it, a digest of its kernels."""

from __future__ import annotations

import hashlib
import os
import platform

import msgspec

from layerzero._util.version import installed_version
from layerzero.actors.device.local_device import LocalDevice
from layerzero.actors.rpc.client import DeviceFacts

# What two devices must agree on before they may answer alike.
DISTRIBUTIONS = (
    "layerzero-runtime", "torch", "triton", "flash-attn", "flash-attn-4", "flashinfer-python", "liger-kernel",
    "xformers", "zentorch", "kernels", "tokenizers", "transformers",
)  # fmt: skip


def versions() -> dict[str, str]:
    """The versions of the libraries that decide what a kernel computes, and of Python."""
    libraries = {name: version for name in DISTRIBUTIONS if (version := installed_version(name)) is not None}
    return {"python": platform.python_version(), **libraries}


def kernels_digest(device: LocalDevice) -> str:
    """A digest of every kernel's id, version and capability: equal where the same choices are possible."""
    digest = hashlib.sha256()
    kernels = sorted(device.kernels(), key=lambda kernel: kernel.id)
    blocked = device.registry.blocked()  # of all of them, now that all are asked for
    for kernel in kernels:
        digest.update(kernel.id.encode())
        digest.update(b"-" if kernel.id in blocked else b"+")
        # A set becomes a list here, in an order that each process has of its own unless it is asked for.
        digest.update(msgspec.json.encode(msgspec.to_builtins(kernel.capability, order="deterministic")))
    return digest.hexdigest()[:32]


def facts_of(device: LocalDevice, name: str, incarnation: str, node: str) -> DeviceFacts:
    """The facts of a device in this process."""
    return DeviceFacts(
        name=name,
        incarnation=incarnation,
        node=node,
        pid=os.getpid(),
        device=str(device.device),
        hardware=device.hardware,
        versions=versions(),
        kernels=kernels_digest(device),
    )
