"""Run every block of the documents (or of the named files) that opens with ```python run.

Each block is a program of its own: it starts in a fresh interpreter, in an empty folder, and must exit 0. One
that opens with ```python run needs=MODULE runs where that is installed, and is said to be skipped elsewhere.
One that says `head` behind that finds a cluster that `ray start --head` began on the loopback interface,
behind a token, which ends with the block, however that ends.

Two blocks run at a time. One that needs a module may be several processes, or a cluster: it runs alone.
"""

import argparse
import importlib.util
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BLOCK = re.compile(r"^```python run(?: needs=(\w+))?( head)?[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
TIMEOUT_S = 180
HEAD_S = 60
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


@dataclass(frozen=True, slots=True)
class Verdict:
    """One block that has run: whether it failed, and the lines that say so."""

    failed: bool
    text: str


def blocks(path: Path) -> list[tuple[int, str, str, bool]]:
    """Return the runnable blocks of one file: line, code, what it needs ("" for nothing), whether a head."""
    text = path.read_text()
    return [
        (text.count("\n", 0, m.start(3)) + 1, m.group(3), m.group(1) or "", bool(m.group(2)))
        for m in BLOCK.finditer(text)
    ]


@contextmanager
def ray_head(folder: str) -> Iterator[dict[str, str]]:
    """A cluster of this machine alone, as `ray start --head` begins it; what a program needs to find it.

    Raises: RuntimeError: it did not start in time; with what it said.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    own = {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_TMPDIR": folder,
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    start = f"start --head --block --node-ip-address=127.0.0.1 --port={port} --num-cpus=2"
    log = Path(folder) / "head.log"
    with log.open("w") as said:
        head = subprocess.Popen(
            [sys.executable, "-m", "ray.scripts.scripts", *start.split(), "--include-dashboard=false"],
            env={**os.environ, **own},
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # so that all it started ends with it
        )
    try:
        until = time.monotonic() + HEAD_S
        while "Ray runtime started" not in log.read_text():
            if head.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"ray start --head did not start: {log.read_text()[-2000:]}")
            time.sleep(0.1)
        yield {**own, "RAY_ADDRESS": f"127.0.0.1:{port}"}
    finally:
        head.terminate()
        with suppress(subprocess.TimeoutExpired):
            head.wait(20)
        with suppress(ProcessLookupError):
            os.killpg(head.pid, signal.SIGKILL)
        head.wait()


def run(code: str, head: bool = False) -> subprocess.CompletedProcess[str]:
    """Run one block and return what it printed; with `head`, beside a cluster."""
    # Ray's last words come late, and the path of a socket has room for a short folder only.
    with tempfile.TemporaryDirectory(prefix="lz", ignore_cleanup_errors=True) as folder:
        beside = ray_head(folder) if head else nullcontext({"RAY_TMPDIR": folder})
        with beside as more:
            return _run(code, folder, more)


def _run(code: str, folder: str, more: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    script = Path(folder) / "example.py"
    script.write_text(code)
    return subprocess.run(
        [sys.executable, str(script)],
        cwd=folder,
        env={**os.environ, "RAY_USAGE_STATS_ENABLED": "0", **more},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


def verdict(path: Path, line: int, code: str, head: bool) -> Verdict:
    """Run one block; what it printed is told only where it failed."""
    begin = time.perf_counter()
    done = run(code, head)
    word = "ok" if done.returncode == 0 else f"exit {done.returncode}"
    text = f"{path.name}:{line}  {word}  {time.perf_counter() - begin:.1f} s"
    return Verdict(done.returncode != 0, f"{text}\n{done.stdout}" if done.returncode else text)


def verdicts(files: list[Path]) -> Iterator[Verdict]:
    """Yield the verdict of each block that can run here, and say which cannot."""
    together: list[tuple[Path, int, str, bool]] = []
    alone: list[tuple[Path, int, str, bool]] = []
    for path in files:
        for line, code, needs, head in blocks(path):
            if needs and importlib.util.find_spec(needs) is None:
                print(f"{path.name}:{line}  skipped: {needs} is not installed")
            else:
                (alone if needs or head else together).append((path, line, code, head))
    with ThreadPoolExecutor(2) as pool:
        yield from pool.map(lambda block: verdict(*block), together)
    for block in alone:
        yield verdict(*block)


def main() -> int:
    """Run all blocks, print one line each, and return how many failed (or 1 if there was none)."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("files", nargs="*", type=Path, default=DOCUMENTS)
    ran = failed = 0
    for each in verdicts(parser.parse_args().files):
        ran += 1
        failed += each.failed
        print(each.text)
    print(f"{ran} examples run, {failed} failed")
    return failed if ran else 1


if __name__ == "__main__":
    sys.exit(main())
