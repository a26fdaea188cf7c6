"""Two hosts in this machine: network namespaces with a cable between them, and a Ray node in each.

Needs Linux, root, iproute2 and /dev/net/tun; `why_not` says what is missing. What runs in a namespace ends
with it. A host may have clocks of its own (`Clocks`): hosts boot at different times, and some are wrong.
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
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from benchmarks.hosting import cable as cables

PORT = 6399
ADDRESSES = {1: "10.77.0.1", 2: "10.77.0.2"}
_WAIT_S = 90.0
_CABLE_S = 20.0
# Imported by every Python process at its start, before anything reads a clock.
_WRONG_CLOCK = """
import os, time
_offset_s = float(os.environ["HOST_CLOCK_OFFSET_S"])
_time, _time_ns = time.time, time.time_ns
time.time = lambda: _time() + _offset_s
time.time_ns = lambda: _time_ns() + int(_offset_s * 1e9)
"""


@dataclass(frozen=True, slots=True)
class Clocks:
    """How a host's clocks differ from this machine's: Python's time of day, and the time since its start."""

    wall_s: float = 0.0
    since_start_s: int = 0

    def command(self, command: Sequence[str]) -> list[str]:
        """A command as it is run under these clocks."""
        if not self.since_start_s:
            return list(command)
        seconds = str(self.since_start_s)
        return ["unshare", "--time", "--fork", "--monotonic", seconds, "--boottime", seconds, *command]


def why_not() -> str:
    """Why namespaces cannot be made here; empty where they can."""
    if sys.platform != "linux":
        return "network namespaces need Linux"
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "network namespaces need ip, of iproute2"
    if not os.path.exists("/dev/net/tun"):
        return "the cable between network namespaces needs /dev/net/tun"
    name = f"lz{os.getpid()}t"
    tried = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if tried.returncode:
        return f"a network namespace cannot be made: {tried.stderr.strip()}"
    subprocess.run(["ip", "netns", "delete", name], check=False)
    return ""


class Network:
    """Two namespaces, `first` and `second`, with addresses of their own; `cable` is what `cut` takes."""

    def __init__(self) -> None:
        stem = f"lz{os.getpid()}"
        self.first, self.second = f"{stem}a", f"{stem}b"
        self.folder = ""
        self._carrier: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Network:
        self.folder = tempfile.mkdtemp(prefix="lzh")
        try:
            for name in (self.first, self.second):
                _ip("netns", "add", name)
                _ip("-n", name, "link", "set", "lo", "up")
            ends = [self.first, ADDRESSES[1], self.second, ADDRESSES[2]]
            self._carrier = subprocess.Popen([sys.executable, cables.__file__, self.cable, *ends])
            until = time.monotonic() + _CABLE_S
            while not os.path.exists(self.cable):
                if self._carrier.poll() is not None or time.monotonic() > until:
                    raise RuntimeError("the cable between the hosts could not be laid")
                time.sleep(0.005)
        except BaseException:
            self.close()
            raise
        return self

    @property
    def cable(self) -> str:
        """What `cut` and `mend` take, also in a process of a namespace."""
        return f"{self.folder}/cable"

    def inside(self, number: int) -> AbstractContextManager[None]:
        """A block of this thread on host 1 or 2; sockets and threads that it makes stay there."""
        return cables.inside({1: self.first, 2: self.second}[number])

    @staticmethod
    def command(name: str, command: Sequence[str]) -> list[str]:
        """A command as it is run in a namespace."""
        return ["ip", "netns", "exec", name, *command]

    def close(self) -> None:
        """End every process of both hosts, and the hosts."""
        for name in (self.first, self.second):
            until = time.monotonic() + 10.0
            while (pids := _pids(name)) and time.monotonic() < until:
                for pid in pids:
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                time.sleep(0.05)
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)
        if self._carrier is not None:
            self._carrier.kill()
            self._carrier.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Hosts(Network):
    """The same with Ray: the first host has its head and the driver, the second a node."""

    def __init__(
        self,
        environment: Mapping[str, str],
        first_gpus: int = 2,
        second_gpus: int = 1,
        second_clocks: Clocks = Clocks(),
    ) -> None:
        super().__init__()
        self._gpus = {self.first: first_gpus, self.second: second_gpus}
        self._clocks = {self.first: Clocks(), self.second: second_clocks}
        self._environment = {**os.environ, **environment}
        self.address = f"{ADDRESSES[1]}:{PORT}"

    def __enter__(self) -> Hosts:
        super().__enter__()
        try:
            self._ray(self.first, "--head", f"--port={PORT}", f"--node-ip-address={ADDRESSES[1]}")
            self._ray(self.second, f"--address={self.address}", f"--node-ip-address={ADDRESSES[2]}")
        except BaseException:
            self.close()
            raise
        return self

    def _ray(self, name: str, *arguments: str) -> None:
        alone = [f"--temp-dir={self.folder}", "--include-dashboard=false", "--disable-usage-stats"]
        given = [*arguments, "--num-cpus=2", f"--num-gpus={self._gpus[name]}"]
        given += alone if "--head" in arguments else []
        started = self.run(name, [sys.executable, "-m", "ray.scripts.scripts", "start", *given], _WAIT_S)
        if started.returncode:
            raise RuntimeError(f"no Ray node on {name}: {started.stdout[-2000:]}")

    def run(self, name: str, command: Sequence[str], timeout_s: float) -> subprocess.CompletedProcess[str]:
        """What a command gives on a host, under its clocks."""
        clocks = self._clocks[name]
        full = self.command(name, clocks.command(command))
        with tempfile.TemporaryFile("w+") as out:  # daemons keep it open, so no pipe would end
            done = subprocess.run(
                full,
                env=self._variables(clocks),
                stdout=out,
                stderr=subprocess.STDOUT,
                timeout=timeout_s,
                check=False,
            )
            out.seek(0)
            return subprocess.CompletedProcess(full, done.returncode, out.read(), "")

    def _variables(self, clocks: Clocks) -> dict[str, str]:
        if not clocks.wall_s:
            return self._environment
        folder = Path(self.folder) / "clock"
        folder.mkdir(exist_ok=True)
        (folder / "sitecustomize.py").write_text(_WRONG_CLOCK)
        paths = [str(folder), self._environment.get("PYTHONPATH", "")]
        return {
            **self._environment,
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "HOST_CLOCK_OFFSET_S": str(clocks.wall_s),
        }


def shape(
    cable: str, *, delay_s: float | None = None, loss: float | None = None, towards: int | None = None
) -> dict[int, tuple[int, int]]:
    """Delay or lose what leads to host `towards`, both ways by default; packets carried and lost so far."""
    values = {name: value for name, value in (("delay_s", delay_s), ("loss", loss)) if value is not None}
    return cables.tell(cable, dict.fromkeys((1, 2) if towards is None else (towards,), values))


def cut(cable: str, towards: int | None = None) -> None:
    """Let nothing through, or nothing that leads to one host: both ends hear nothing of it."""
    shape(cable, loss=1.0, towards=towards)


def mend(cable: str) -> None:
    """Let everything through again."""
    shape(cable, loss=0.0)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


def _pids(name: str) -> list[int]:
    listed = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, check=False)
    return [
        int(pid) for pid in listed.stdout.split() if int(pid) != os.getpid() and Path(f"/proc/{pid}").exists()
    ]
