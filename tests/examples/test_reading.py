"""What examples must not do: stop a coroutine for a device by reading one of its tensors."""

from __future__ import annotations

import ast
import asyncio
import sys
import weakref
from collections.abc import AsyncGenerator, Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import generate
import pytest
import torch
from models import llama
from server.engine import Engine
from server.protocol import Sampling
from torch import Tensor

import layerzero as lz

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
READS = {"item", "cpu", "tolist", "numpy"}
BLOCKING = {"generate_by_hand"}  # functions of examples that no loop runs beside: they compare


def reads(source: str) -> list[str]:
    """The method calls in `source` that wait for a device, as "line: name"."""
    tree = ast.parse(source)
    alone = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and node.name in BLOCKING
        for inner in ast.walk(node)
    }
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call) and node not in alone)
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
    sources = {
        str(file.relative_to(EXAMPLES)): file.read_text(encoding="utf-8")
        for file in sorted(EXAMPLES.rglob("*.py"))
    }
    serving = {name: source for name, source in sources.items() if serves(source)}
    assert {"embed.py", "models/minilm.py", "server/engine.py"} <= set(serving)
    assert {name: found for name, source in serving.items() if (found := reads(source))} == {}


def test_a_read_is_found() -> None:
    """The check itself sees each kind of read."""
    source = "\n".join(f"x.{name}()" for name in sorted(READS))
    assert reads(source) == ["1: cpu", "2: item", "3: numpy", "4: tolist"]


# -- while it runs: what no source shows, such as int() of a tensor ---------------------------------------

WAITING = (
    "__bool__", "__complex__", "__contains__", "__float__", "__index__", "__int__", "cpu", "item", "numpy",
    "tolist",
)  # fmt: skip
READING = ("int(x)", "float(x)", "bool(x)", "[0][x]", "x.item()", "x.tolist()", "x.cpu()")


@pytest.fixture
def read_behind_the_loop(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Reads, by a file of the examples, of tensors that `lz.to_host` did not give, as "file: method"."""
    found: list[str] = []
    handed_out: weakref.WeakSet[Tensor] = weakref.WeakSet()
    to_host, run_ahead = lz.to_host, lz.run_ahead

    class Noted:
        def __init__(self, tensor: Tensor) -> None:
            self._reading = to_host(tensor)

        @property
        def done(self) -> bool:
            return self._reading.done

        def __await__(self) -> Generator[Any, Any, Tensor]:
            host = yield from self._reading.__await__()
            handed_out.add(host)
            return host

    async def noted_ahead(*args: Any, **kwargs: Any) -> AsyncGenerator[Tensor, None]:
        async for host in run_ahead(*args, **kwargs):
            handed_out.add(host)
            yield host

    def watched(name: str) -> Callable[..., Any]:
        read = getattr(Tensor, name)

        def call(self: Tensor, *args: Any, **kwargs: Any) -> Any:
            caller = Path(sys._getframe(1).f_code.co_filename)
            if caller.is_relative_to(EXAMPLES) and not any(self is known for known in handed_out):
                found.append(f"{caller.name}: {name}")
            return read(self, *args, **kwargs)

        return call

    monkeypatch.setattr(lz, "to_host", Noted)
    monkeypatch.setattr(lz, "run_ahead", noted_ahead)
    for name in WAITING:
        monkeypatch.setattr(Tensor, name, watched(name))
    yield found


@pytest.mark.parametrize("per", ["op", "layer", "step"])
def test_generating_reads_nothing_behind_the_loop(per: llama.Per, read_behind_the_loop: list[str]) -> None:
    """Two requests at once: all that leaves the device leaves through the library."""
    model = llama.load(pages=32, per=per)
    read_behind_the_loop.clear()  # loading may read what it likes

    async def one(prompt: list[int]) -> list[int]:
        sampling = generate.SamplingParams(max_tokens=4, seed=1)
        return [token async for token in generate.generate(model, prompt, sampling)]

    async def both() -> list[list[int]]:
        return list(await asyncio.gather(one([5, 6, 7]), one([8])))

    with lz.start(lz.Settings(warm="off"), scoped=True):
        assert all(asyncio.run(both()))
    assert read_behind_the_loop == []


def test_the_servers_loop_reads_nothing_behind_it(read_behind_the_loop: list[str]) -> None:
    """A request with rules and one without, in the loop that the server runs."""
    engine = Engine(llama.load(pages=32), frozenset())
    read_behind_the_loop.clear()

    async def one(prompt: list[int], sampling: Sampling) -> list[int]:
        return [drawn.token async for drawn in engine.generate(prompt, sampling, 4)]

    async def both() -> list[list[int]]:
        ruled = Sampling(seed=1, presence_penalty=1.0, min_p=0.1, logit_bias=((5, 1.0),))
        return list(await asyncio.gather(one([5, 6, 7], Sampling(seed=1)), one([8], ruled)))

    with lz.start(lz.Settings(warm="off"), scoped=True):
        assert all(asyncio.run(both()))
    assert read_behind_the_loop == []


@pytest.mark.parametrize(
    "name", ["int(x)", "float(x)", "bool(x)", "[0][x]", "x.item()", "x.tolist()", "x.cpu()"]
)
def test_a_read_while_it_runs_is_found(name: str, read_behind_the_loop: list[str]) -> None:
    """The control: the same line in a file of the examples."""
    planted = compile(f"y = {name}", str(EXAMPLES / "planted.py"), "exec")
    exec(planted, {"x": torch.zeros((), dtype=torch.int64)})
    assert len(read_behind_the_loop) == 1 and read_behind_the_loop[0].startswith("planted.py")

    async def asked() -> None:
        exec(planted, {"x": await lz.to_host(torch.zeros((), dtype=torch.int64))})

    with lz.start(lz.Settings(warm="off"), scoped=True):
        asyncio.run(asked())
    assert len(read_behind_the_loop) == 1
