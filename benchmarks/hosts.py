"""Two hosts in this machine, as network namespaces, a Ray node in each, and a cable that can be cut.

Needs Linux, root and iproute2; `why_not` says what is missing. What runs in a namespace ends with it.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType

PORT = 6399
_WAIT_S = 90.0


def why_not() -> str:
    """Why namespaces cannot be made here; empty where they can."""
    if sys.platform != "linux":
        return "network namespaces need Linux"
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "network namespaces need ip, of iproute2"
    name = f"lz{os.getpid()}t"
    tried = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if tried.returncode:
        return f"a network namespace cannot be made: {tried.stderr.strip()}"
    subprocess.run(["ip", "netns", "delete", name], check=False)
    return ""


class Hosts:
    """The first host has Ray's head and the driver, the second a node; a third namespace is the switch."""

    def __init__(self, environment: Mapping[str, str], first_gpus: int = 2, second_gpus: int = 1) -> None:
        stem = f"lz{os.getpid()}"
        self.first, self.second, self._switch = f"{stem}a", f"{stem}b", f"{stem}s"
        self._gpus = {self.first: first_gpus, self.second: second_gpus}
        self._environment = {**os.environ, **environment}
        self._folder = ""
        self.address = f"10.77.0.1:{PORT}"

    def __enter__(self) -> Hosts:
        self._folder = tempfile.mkdtemp(prefix="lzh")
        try:
            for name in (self.first, self.second, self._switch):
                _ip("netns", "add", name)
                _ip("-n", name, "link", "set", "lo", "up")
            _ip("-n", self._switch, "link", "add", "switch", "type", "bridge")
            _ip("-n", self._switch, "link", "set", "switch", "up")
            for number, name in enumerate((self.first, self.second), 1):
                port = f"port{number}"
                _ip("-n", self._switch, "link", "add", port, "type", "veth", "peer", "eth0", "netns", name)
                _ip("-n", self._switch, "link", "set", port, "master", "switch", "up")
                _ip("-n", name, "address", "add", f"10.77.0.{number}/24", "dev", "eth0")
                _ip("-n", name, "link", "set", "eth0", "up")
            self._ray(self.first, "--head", f"--port={PORT}", "--node-ip-address=10.77.0.1")
            self._ray(self.second, f"--address={self.address}", "--node-ip-address=10.77.0.2")
        except BaseException:
            self.close()
            raise
        return self

    def _ray(self, name: str, *arguments: str) -> None:
        alone = [f"--temp-dir={self._folder}", "--include-dashboard=false", "--disable-usage-stats"]
        given = [*arguments, "--num-cpus=2", f"--num-gpus={self._gpus[name]}"]
        given += alone if "--head" in arguments else []
        started = self.run(name, [sys.executable, "-m", "ray.scripts.scripts", "start", *given], _WAIT_S)
        if started.returncode:
            raise RuntimeError(f"no Ray node on {name}: {started.stdout[-2000:]}")

    @staticmethod
    def command(name: str, command: Sequence[str]) -> list[str]:
        """A command as it is run in a namespace."""
        return ["ip", "netns", "exec", name, *command]

    def run(self, name: str, command: Sequence[str], timeout_s: float) -> subprocess.CompletedProcess[str]:
        """What a command gives in a namespace."""
        full = self.command(name, command)
        with tempfile.TemporaryFile("w+") as out:  # daemons keep it open, so no pipe would end
            done = subprocess.run(
                full,
                env=self._environment,
                stdout=out,
                stderr=subprocess.STDOUT,
                timeout=timeout_s,
                check=False,
            )
            out.seek(0)
            return subprocess.CompletedProcess(full, done.returncode, out.read(), "")

    def close(self) -> None:
        """End every process of both hosts, and the hosts."""
        for name in (self.first, self.second, self._switch):
            until = time.monotonic() + 10.0
            while (pids := _pids(name)) and time.monotonic() < until:
                for pid in pids:
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                time.sleep(0.05)
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)
        shutil.rmtree(self._folder, ignore_errors=True)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def cable(self) -> str:
        """What `cut` and `mend` take, also in a process of a namespace."""
        return self._switch


def cut(cable: str) -> None:
    """Let nothing through: both ends keep their addresses, and hear nothing of it."""
    _ip("-n", cable, "link", "set", "port2", "down")


def mend(cable: str) -> None:
    """Let everything through again."""
    _ip("-n", cable, "link", "set", "port2", "up")


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


def _pids(name: str) -> list[int]:
    listed = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, check=False)
    return [
        int(pid) for pid in listed.stdout.split() if int(pid) != os.getpid() and Path(f"/proc/{pid}").exists()
    ]
