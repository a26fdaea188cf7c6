"""Run every block of the README and of docs/ (or of the named files) that opens with ```python run.

Each block is a program of its own: it starts in a fresh interpreter, in an empty folder, and must exit 0. One
that opens with ```python run needs=MODULE runs where that is installed, and is said to be skipped elsewhere.
"""

import argparse
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BLOCK = re.compile(r"^```python run(?: needs=(\w+))?[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
TIMEOUT_S = 180
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(path: Path) -> list[tuple[int, str, str]]:
    """Return the runnable blocks of one file, each with its line and what it needs, "" for nothing."""
    text = path.read_text()
    return [(text.count("\n", 0, m.start(2)) + 1, m.group(2), m.group(1) or "") for m in BLOCK.finditer(text)]


def run(code: str) -> subprocess.CompletedProcess[str]:
    """Run one block and return what it printed."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:  # Ray's last words come late
        script = Path(folder) / "example.py"
        script.write_text(code)
        return subprocess.run(
            [sys.executable, str(script)],
            cwd=folder,
            env={**os.environ, "RAY_TMPDIR": folder, "RAY_USAGE_STATS_ENABLED": "0"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )


def main() -> int:
    """Run all blocks, print one line each, and return how many failed (or 1 if there was none)."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("files", nargs="*", type=Path, default=DOCUMENTS)
    ran = failed = 0
    for path in parser.parse_args().files:
        for line, code, needs in blocks(path):
            if needs and importlib.util.find_spec(needs) is None:
                print(f"{path.name}:{line}  skipped: {needs} is not installed")
                continue
            begin = time.perf_counter()
            done = run(code)
            ran += 1
            failed += done.returncode != 0
            verdict = "ok" if done.returncode == 0 else f"exit {done.returncode}"
            print(f"{path.name}:{line}  {verdict}  {time.perf_counter() - begin:.1f} s")
            if done.returncode:
                print(done.stdout)
    print(f"{ran} examples run, {failed} failed")
    return failed if ran else 1


if __name__ == "__main__":
    sys.exit(main())
