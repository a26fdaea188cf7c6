"""The two servers of benchmarks/engines_http.py: how each is started, looked at and ended."""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from generating.folder import LLAMA_8B

ROOT = Path(__file__).resolve().parents[2]
MODEL, PAGE = "model", 16
Command = tuple[list[str], dict[str, str]]


def our_command(options: argparse.Namespace, folder: Path, port: int) -> Command:
    """Our server, as its users start it."""
    command = [
        sys.executable, str(ROOT / "examples" / "serve.py"), "--model", str(folder / MODEL),
        "--device", options.device, "--load-format", "dummy", "--port", str(port),
        "--pages", str(options.tokens // PAGE), "--page-size", str(PAGE), "--max-requests", "1024",
        "--max-waiting-tokens", str(1 << 21),
    ]  # fmt: skip
    variables = {"PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    if options.rehearse:  # compiling our own C++ is what other benchmarks show
        variables |= {"LAYERZERO_NATIVE": "off", "LAYERZERO_DENY": "native.*,zentorch.*"}
    return [*command, *shlex.split(options.our_flags)], variables


def vllm_command(options: argparse.Namespace, folder: Path, port: int) -> Command:
    """vLLM's OpenAI server with its defaults, and as many tokens of keys and values as ours."""
    shape = LLAMA_8B
    token = 2 * 2 * shape["num_key_value_heads"] * shape["head_dim"] * shape["num_hidden_layers"]
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder / MODEL),
        "--served-model-name", MODEL, "--load-format", "dummy", "--dtype", "bfloat16",
        "--host", "127.0.0.1", "--port", str(port), "--disable-uvicorn-access-log",
        "--kv-cache-memory-bytes", str(options.tokens * token), "--gpu-memory-utilization", "0.4",
    ]  # fmt: skip
    quiet = ("VLLM_NO_USAGE_STATS", "VLLM_DO_NOT_TRACK", "HF_HUB_OFFLINE")
    variables = dict.fromkeys(quiet, "1") | {
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "VLLM_LOGGING_LEVEL": "WARNING",
    }
    variables["PYTHONPATH"] = options.vllm_python or ""
    return [*command, *shlex.split(options.vllm_flags)], variables


def peer_command(options: argparse.Namespace, folder: Path, port: int) -> Command:
    """What stands in the peer's place."""
    if options.peer_command:
        return [word.replace("PORT", str(port)) for word in shlex.split(options.peer_command)], {}
    return (our_command if options.rehearse else vllm_command)(options, folder, port)


@dataclass
class Server:
    """One server in a process group of its own."""

    name: str
    command: Command
    port: int
    log: Path
    process: subprocess.Popen[bytes] = field(init=False)
    began: float = field(init=False, default_factory=time.monotonic)

    def __post_init__(self) -> None:
        words, variables = self.command
        with self.log.open("wb") as printed:
            self.process = subprocess.Popen(
                words, env=os.environ | variables, stdin=subprocess.DEVNULL, stdout=printed,
                stderr=subprocess.STDOUT, start_new_session=True, cwd=self.log.parent,
            )  # fmt: skip

    def get(self, path: str) -> str | None:
        """What a path answers; None where there is no answer yet."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=5) as answer:
                text: str = answer.read().decode()
                return text
        except (OSError, urllib.error.URLError):
            return None

    def check(self) -> None:
        """Raises: RuntimeError: it has ended; with the end of what it printed."""
        if (status := self.process.poll()) is not None:
            raise RuntimeError(f"{self.name} ended with status {status}: {self.tail()}")

    def tail(self) -> str:
        """The end of what it printed."""
        return self.log.read_text(errors="replace")[-1500:]

    @property
    def busy(self) -> bool:
        """Whether it says that kernels are on their way to it."""
        text = self.get("/metrics") or ""
        return any(
            line.startswith("kernels_loading ") and line.split()[1] != "0.0" for line in text.split("\n")
        )

    def end(self) -> None:
        """End it and all that it started."""
        for number, wait_s in ((signal.SIGTERM, 5.0), (signal.SIGKILL, 5.0)):
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(wait_s)


def free_port() -> int:
    """A port of loopback that nobody has."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port
