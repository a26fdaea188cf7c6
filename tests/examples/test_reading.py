"""What examples must not do: stop a coroutine for a device by reading one of its tensors."""

from __future__ import annotations

import ast
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
READS = {"item", "cpu", "tolist", "numpy"}


def reads(source: str) -> list[str]:
    """The method calls in `source` that wait for a device, as "line: name"."""
    calls = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call))
    return [
        f"{call.lineno}: {call.func.attr}"
        for call in calls
        if isinstance(call.func, ast.Attribute) and call.func.attr in READS
    ]


def serves(source: str) -> bool:
    """Whether a file takes part in serving: it has coroutines or uses the library; training does not."""
    return "async def " in source or "import layerzero" in source


def test_no_example_reads_a_tensor_behind_the_loop() -> None:
    """Results leave a device through `lz.to_host` wherever requests are served."""
    sources = {file.name: file.read_text(encoding="utf-8") for file in sorted(EXAMPLES.rglob("*.py"))}
    serving = {name: source for name, source in sources.items() if serves(source)}
    assert {"embedding_service.py", "minilm.py", "load.py"} <= set(serving)
    assert {name: found for name, source in serving.items() if (found := reads(source))} == {}


def test_a_read_is_found() -> None:
    """The check itself sees each kind of read."""
    source = "\n".join(f"x.{name}()" for name in sorted(READS))
    assert reads(source) == ["1: cpu", "2: item", "3: numpy", "4: tolist"]
