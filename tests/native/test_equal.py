"""Random histories of calls, modes, edited weights and policies: compiled and Python give the same."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import layerzero as lz
from layerzero.native import FAST_PATH
from layerzero.spec.errors import BackendNotAvailableError

WIDTH = 8
Step = tuple[Any, ...]


class World:
    """The weights of one history, and what its calls gave."""

    def __init__(self) -> None:
        self.random = torch.Generator().manual_seed(0)
        self.weights = {
            "linear": self.draw(WIDTH, WIDTH),
            "twin": self.draw(WIDTH, WIDTH),
            "norm": self.draw(WIDTH),
            "table": self.draw(WIDTH, WIDTH),
            "up": self.draw(2 * WIDTH, WIDTH),
            "down": self.draw(WIDTH, WIDTH),
        }
        self.seen: list[Any] = []

    def draw(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.random)

    def call(self, op: str, rows: int, form: str, options: dict[str, Any]) -> Any:
        """One awaited call of `op` over `rows` rows."""
        held = self.weights
        if op == "embedding":
            high = 9 if form == "wrong" else 8  # one id in nine is out of range, sometimes
            ids = torch.randint(high, (rows,), generator=self.random)
            return lz.embedding(ids, held["table"], **options)
        x = self.formed(rows, form)
        if op in ("linear", "twin"):
            return lz.linear(x, held[op], **options)
        if op == "rms_norm":
            return lz.rms_norm(x, held["norm"], **options)
        if op == "mlp":
            return lz.mlp(x, held["up"], held["down"], **options)
        q = x.reshape(1, -1, 1, x.shape[-1])
        return lz.attention(q, q, q, **options)

    def formed(self, rows: int, form: str) -> Tensor:
        """Rows: dense, far apart, one row seen many times, of a wider tensor, too narrow, leading."""
        if form == "apart":
            return self.draw(2 * rows + 1, WIDTH)[1::2]
        if form == "expanded":
            return self.draw(1, WIDTH).expand(rows, WIDTH)
        if form == "wide":
            return self.draw(rows, 2 * WIDTH)[:, :WIDTH]
        if form == "wrong":
            return self.draw(rows, WIDTH - 1)
        if form == "leading":
            return self.draw(2, rows, WIDTH)
        if form == "graph":
            return self.draw(rows, WIDTH).requires_grad_()
        return self.draw(rows, WIDTH)

    def edit(self, name: str, how: str) -> None:
        """Change a weight as training, loading and hostile code do."""
        held = self.weights[name]
        fresh = self.draw(*held.shape).to(held.dtype)
        if how == "in place":
            with torch.no_grad():
                held.mul_(-1.5)
        elif how == "data":
            held.data = fresh
        elif how == "set":
            with torch.no_grad():
                held.set_(fresh)  # type: ignore[call-overload]  # torch declares storages alone
        elif how == "replaced":
            del held
            self.weights[name] = fresh
        elif how == "transposed" and held.dim() == 2 and held.shape[0] == held.shape[1]:
            self.weights[name] = held.detach().t()
        elif how == "gradient":
            self.weights[name] = held.detach().requires_grad_(not held.requires_grad)
        elif how == "parameter":
            self.weights[name] = torch.nn.Parameter(held.detach(), requires_grad=False)
        elif how == "double":
            self.weights[name] = (
                held.detach().double() if held.dtype == torch.float32 else held.detach().float()
            )
        elif how == "offset":
            self.weights[name] = torch.cat([fresh, held.detach()])[held.shape[0] :]


@contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "plain": nullcontext,
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "deterministic": deterministic,
    "device": lambda: torch.device("cpu"),
    "prefer": lambda: lz.prefer("reference"),
}

EDITS = ("in place", "data", "set", "replaced", "transposed", "gradient", "parameter", "double", "offset")
OPS = ["linear", "linear", "twin", "twin", "rms_norm", "mlp", "embedding", "attention"]
one_call = st.tuples(
    st.sampled_from(OPS),
    st.sampled_from([1, 1, 1, 2, 0]),
    st.sampled_from(["dense"] * 9 + ["apart", "expanded", "wide", "wrong", "leading", "graph"]),
    st.sampled_from(
        [{}] * 6 + [{"backend": "reference"}, {"batching": "off"}, {"priority": 0}, {"priority": 7}]
    ),
)
steps = st.one_of(
    st.tuples(
        st.just("calls"),
        st.sampled_from(["plain"] * 4 + sorted(MODES)),
        st.lists(one_call, min_size=1, max_size=6),
    ),
    st.tuples(
        st.just("edit"),
        st.sampled_from(["linear", "linear", "twin", "norm", "table", "up", "down"]),
        st.sampled_from(EDITS),
    ),
    st.tuples(st.just("policy"), st.sampled_from(["lock", "unlock", "other", "free"])),
)


def change_policy(what: str) -> None:
    if what == "lock":
        lz.lock("linear", "reference.linear")
    elif what == "unlock":
        lz.unlock("linear")
    elif what == "other":
        lz.lock("rms_norm", "reference.rms_norm")
    else:
        lz.unlock("rms_norm")


def gist(outcome: Any) -> Any:
    """What is compared of a call: kind and words of an error, dtype, kind and values of a tensor."""
    if isinstance(outcome, BaseException):
        return type(outcome).__name__, str(outcome).split("\n")[0][:60]
    assert isinstance(outcome, Tensor)
    return type(outcome), outcome.requires_grad, outcome.is_inference(), outcome.detach().clone()


async def history(told: list[Step], module: Any) -> list[Any]:
    """Every outcome of one history."""
    FAST_PATH.use(module)
    world = World()
    with lz.start(lz.Settings(warm="off")):
        last: Step | None = None
        for step in told:
            if step[0] == "edit":
                world.edit(step[1], step[2])
            elif step[0] == "policy":
                change_policy(step[1])
            else:
                last = step
            if last is None:
                continue
            # After a change the calls from before it: what was remembered of them is asked for.
            for _ in range(2):
                with MODES[last[1]]():
                    coroutines = [world.call(*each) for each in last[2]]
                    outcomes = await asyncio.gather(*coroutines, return_exceptions=True)
                world.seen += map(gist, outcomes)
    return world.seen


@pytest.mark.parametrize("name", ["linear", "norm", "table", "up"])
def test_any_edit_can_follow_any_other(name: str) -> None:
    """What a history may draw is possible: an edit that raises would fail one history in thirty."""
    for edits in itertools.product(EDITS, repeat=2):
        world = World()
        shape = world.weights[name].shape
        for how in edits:
            world.edit(name, how)
        assert world.weights[name].shape == shape, edits


@settings(max_examples=25, deadline=None)
@given(told=st.lists(steps, min_size=2, max_size=10))
def test_a_history_is_the_same_compiled_and_in_python(told: list[Step]) -> None:
    """Every value, gradient flag and error, whatever was remembered before weights and policies changed."""
    torch.use_deterministic_algorithms(False)  # imports torch's compiler, which no loop should wait for
    before = FAST_PATH.module
    try:
        module = FAST_PATH.load()
        compiled = asyncio.run(history(told, module))
        python = asyncio.run(history(told, None))
    except BackendNotAvailableError as error:
        pytest.skip(f"nothing to compile with: {error}")
    finally:
        FAST_PATH.use(before)
    assert len(compiled) == len(python)
    for ours, theirs in zip(compiled, python, strict=True):
        assert ours[:-1] == theirs[:-1], (ours, theirs)
        if isinstance(ours[-1], Tensor):
            torch.testing.assert_close(ours[-1], theirs[-1], rtol=1e-5, atol=1e-5, equal_nan=True)
        else:
            assert ours == theirs
