"""Which device of a cluster has which GPU of its host: one each, or as many as a setting allows.

Ray gives out numbers of GPUs; what a number means a container, a second cluster or a wrong `num_gpus` may
change. So a device holds locks on files named after its GPU, which end with its process.
"""

from __future__ import annotations

import os
import re
import tempfile
import time
from pathlib import Path

import torch

from layerzero._util.files import fcntl, own_folder
from layerzero.spec.errors import ConfigurationError
from layerzero.spec.reasons import Reason

RELEASE_S = 5.0  # what a process that ends may take to let its GPU go
_LOOK_S = 0.05


def gpu_name(device: torch.device, node: str) -> str | None:
    """The GPU of a device in a Ray actor, or Ray's number of it where the device is a CPU; None without."""
    if device.type == "cuda":
        return f"GPU-{torch.cuda.get_device_properties(device).uuid}"  # the same in every container
    import ray

    numbers = ray.get_runtime_context().get_accelerator_ids().get("GPU", [])
    return f"{node}-{numbers[0]}" if numbers else None


def user_temp_folder() -> Path:
    """A folder for temporary files of this user alone: anybody may make it first where everybody may write.

    Raises: PermissionError: another user has.
    """
    user = os.getuid() if hasattr(os, "getuid") else 0
    return own_folder(Path(tempfile.gettempdir()) / f"layerzero-{user}", default=True)


class GpuClaim:
    """A device's place on one GPU: `limit` devices share it; one that wants it alone shares with none."""

    def __init__(self, gpu: str, who: str, limit: int, *, folder: Path | None = None) -> None:
        self._folder = own_folder(user_temp_folder() / "gpus" if folder is None else folder)
        self._gpu, self._who, self._limit = gpu, who, limit
        self._held: list[int] = []

    def acquire(self, wait_s: float = RELEASE_S) -> None:
        """Take the place, waiting for a process that ends.

        Raises: ConfigurationError, with the reason GPU_TAKEN: others have it; the message names them.
        """
        if fcntl is None:
            return
        until = time.monotonic() + wait_s
        while not self._try():
            if time.monotonic() >= until:
                raise ConfigurationError(
                    f"device {self._who} needs a place on {self._gpu}, which {self._holders()} holds: a GPU "
                    f"has {self._limit} of cluster_devices_per_gpu={self._limit}; raise that for every "
                    "cluster of this host, or give each device a GPU of its own",
                    field="cluster_devices_per_gpu",
                    reason=Reason.GPU_TAKEN,
                )
            time.sleep(_LOOK_S)

    def release(self) -> None:
        """Give the place back."""
        while self._held:
            os.close(self._held.pop())

    def _try(self) -> bool:
        """Alone: the whole GPU. With others: a share of it, and one of the places."""
        alone = self._limit == 1
        if not self._lock("whole", fcntl.LOCK_EX if alone else fcntl.LOCK_SH):
            return False
        if alone or any(self._lock(f"place-{number}", fcntl.LOCK_EX) for number in range(self._limit)):
            os.pwrite(self._held[-1], f"{self._who}, process {os.getpid()}".ljust(200).encode(), 0)
            return True
        self.release()
        return False

    def _lock(self, part: str, kind: int) -> bool:
        handle = os.open(self._path(part), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(handle, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)
            return False
        self._held.append(handle)
        return True

    def _path(self, part: str) -> Path:
        return self._folder / f"{re.sub('[^0-9A-Za-z-]', '_', self._gpu)}.{part}"

    def _holders(self) -> str:
        """The contents of the locked files of this GPU."""
        texts: list[str] = []
        for path in sorted(self._folder.glob(self._path("*").name)):
            if self._lock(path.suffix[1:], fcntl.LOCK_EX):
                self.release()
            else:
                texts.append(path.read_text(encoding="utf-8", errors="replace").strip())
        return "; ".join(text for text in texts if text) or "another process"
