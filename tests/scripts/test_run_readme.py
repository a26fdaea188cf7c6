"""The README's examples are programs that have to run."""

import socket
import sys
from pathlib import Path

import pytest

from scripts import run_readme


def verdict(path: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """Run the examples of one file as the command line does."""
    monkeypatch.setattr(sys, "argv", ["run_readme", str(path)])
    return run_readme.main()


def test_only_marked_blocks_run(tmp_path: Path) -> None:
    """A block without the mark is prose."""
    (path := tmp_path / "a.md").write_text("```python\n1/0\n```\n\n```python run\nprint(1)\n```\n")
    assert run_readme.blocks(path) == [(6, "print(1)\n", "", False)]


@pytest.mark.parametrize(
    ("text", "status"),
    [
        ("```python run\nprint(1)\n```\n", 0),
        ("```python run\nraise SystemExit(3)\n```\n```python run\nprint(1)\n```\n", 1),
        ("no example\n", 1),
    ],
)
def test_a_failing_or_missing_example_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, status: int
) -> None:
    """The exit status counts the examples that failed, and a document without one fails too."""
    (path := tmp_path / "a.md").write_text(text)
    assert verdict(path, monkeypatch) == status


def test_a_block_may_say_what_it_needs(tmp_path: Path) -> None:
    """The module stands beside the block, so that it is skipped by name where it is missing."""
    path = tmp_path / "doc.md"
    path.write_text("```python run needs=ray\nprint(1)\n```\n")
    assert run_readme.blocks(path) == [(2, "print(1)\n", "ray", False)]


def test_a_block_may_ask_for_a_head(tmp_path: Path) -> None:
    """A word behind what it needs; without it no cluster is started."""
    path = tmp_path / "doc.md"
    path.write_text("```python run needs=ray head\nprint(1)\n```\n```python run\nprint(2)\n```\n")
    assert run_readme.blocks(path) == [(2, "print(1)\n", "ray", True), (5, "print(2)\n", "", False)]


def test_two_blocks_run_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each waits for the other to begin, which one after the other never ends well."""
    meet = """
import pathlib, time
here = pathlib.Path({folder!r})
(here / {mine!r}).touch()
until = time.monotonic() + 60
while not (here / {other!r}).exists():
    assert time.monotonic() < until, "the other never began"
    time.sleep(0.01)
"""
    blocks = [meet.format(folder=str(tmp_path), mine=m, other=o) for m, o in (("a", "b"), ("b", "a"))]
    (path := tmp_path / "doc.md").write_text("".join(f"```python run{b}```\n" for b in blocks))
    assert verdict(path, monkeypatch) == 0


def test_a_block_that_needs_a_module_runs_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cluster starves beside another, and ends with its own."""
    lone = f"""
import pathlib, time
held = pathlib.Path({str(tmp_path / "held")!r})
held.touch(exist_ok=False)
time.sleep(0.3)
held.unlink()
"""
    (path := tmp_path / "doc.md").write_text(
        f"```python run needs=json{lone}```\n```python run{lone}```\n```python run needs=json{lone}```\n"
    )
    assert verdict(path, monkeypatch) == 0


@pytest.mark.ray
def test_the_head_ends_with_its_block_however_that_ends() -> None:
    """A block that fails beside a cluster: its status is told, and nothing listens any more."""
    pytest.importorskip("ray", reason="ray is not installed: pip install 'layerzero-runtime[ray]'")
    code = """
import os, socket
host, port = os.environ["RAY_ADDRESS"].split(":")
socket.create_connection((host, int(port))).close()
print(port)
raise SystemExit(3)
"""
    done = run_readme.run(code, head=True)
    assert done.returncode == 3, done.stdout
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", int(done.stdout)))
