"""Who has a GPU: one device alone, or as many as the setting says; a claim ends with its process."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from layerzero.actors.remote.gpu_claims import GpuClaim
from layerzero.spec.errors import ConfigurationError
from layerzero.spec.reasons import Reason

HOLDER = """
import sys
from pathlib import Path
from layerzero.actors.remote.gpu_claims import GpuClaim
GpuClaim("GPU-1", "gpu-0 of pool abc", 1, folder=Path(sys.argv[1])).acquire()
print("held", flush=True)
sys.stdin.read()
"""


def test_a_second_device_is_refused_by_name_until_the_first_ones_process_ends(tmp_path: Path) -> None:
    """The error names the GPU, its holder and the setting; a kill frees it; another one was always free."""
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        held_by = rf"GPU-1, which gpu-0 of pool abc, process {holder.pid} holds"
        with pytest.raises(ConfigurationError, match=held_by) as no:
            GpuClaim("GPU-1", "gpu-7", 1, folder=tmp_path).acquire(0.1)
        assert no.value.context["reason"] is Reason.GPU_TAKEN
        assert no.value.context["field"] == "cluster_devices_per_gpu"
        with pytest.raises(ConfigurationError, match="GPU-1"):
            GpuClaim("GPU-1", "gpu-7", 2, folder=tmp_path).acquire(0.1)  # the first wants it alone
        GpuClaim("GPU-2", "gpu-7", 1, folder=tmp_path).acquire(0.1)
        holder.send_signal(signal.SIGKILL)
        GpuClaim("GPU-1", "gpu-7", 1, folder=tmp_path).acquire(60.0)
    finally:
        holder.kill()
        holder.communicate()


def test_as_many_share_a_gpu_as_the_setting_says(tmp_path: Path) -> None:
    """A third of two is refused with both names; so is who wants it alone; a free place is taken."""
    first, second, third = (GpuClaim("GPU-1", f"gpu-{number}", 2, folder=tmp_path) for number in range(3))
    first.acquire(0.1)
    second.acquire(0.1)
    with pytest.raises(ConfigurationError, match=r"gpu-0, process \d+; gpu-1, process"):
        third.acquire(0.1)
    with pytest.raises(ConfigurationError):
        GpuClaim("GPU-1", "alone", 1, folder=tmp_path).acquire(0.1)
    second.release()
    third.acquire(0.1)
