"""What a call's data may hold is one question: asked before any kernel, blocking and awaited, of a copy."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor
from torch._subclasses import FakeTensorMode

import layerzero as lz
import layerzero.sync
from layerzero.ops import table
from layerzero.runtime import Runtime
from tests.kernels import EVERYTHING, kernel
from tests.native.twins import both_paths as both_paths
from tests.ops.wild import BAD, GOOD, INDICES, Call, answer, fresh, same

WRONG = [
    pytest.param(op, name, number, id=f"{op}-{name}-{number}")
    for op, arguments in BAD.items()
    for name, values in arguments.items()
    for number in range(len(values))
]
OPS = sorted(GOOD)


@pytest.fixture
def runtime() -> Iterator[Runtime]:
    """A runtime whose calls run on the loop's thread, at once or as batches."""
    with lz.start(lz.Settings(batching="all", warm="off")) as opened:
        yield opened


class Spy:
    """The reference of an op as its cheapest kernel; notes what reaches it, after `first` has been called."""

    def __init__(self, runtime: Runtime, op: str) -> None:
        self.op = table.get(op)
        self.seen: list[tuple[Any, ...]] = []
        self.first: Any = lambda: None
        features = frozenset({"prefill", "kv_strided"} | EVERYTHING)
        layouts = frozenset({"NHD"}) if op.endswith(("paged_attention", "append_kv")) else frozenset()
        runtime.add_kernel(kernel(f"spy.{op}", self.run, launch_us=0.001, features=features, layouts=layouts))
        lz.lock(op, f"spy.{op}")

    def run(self, *args: Any) -> Any:
        self.first()
        self.seen.append(args)
        return self.op.reference(*args)


def wrong(op: str, name: str, number: int) -> Call:
    return {**fresh(op), name: BAD[op][name][number].clone()}


@pytest.mark.parametrize(("op", "name", "number"), WRONG)
def test_bad_data_is_refused_before_any_kernel(runtime: Runtime, op: str, name: str, number: int) -> None:
    """Blocking, bound, alone in a loop and from a memo: the argument is named, and nothing ran."""
    spy = Spy(runtime, op)
    call = wrong(op, name, number)
    before = {key: v.clone() for key, v in call.items() if isinstance(v, Tensor)}
    with pytest.raises(ValueError, match=f"^{name} needs"):
        getattr(lz.sync, op)(**call)
    names = inspect.signature(table.get(op).build).parameters.values()
    free = [p.name for p in names if p.kind is not p.KEYWORD_ONLY and p.name in call]
    fixed = {key: value for key, value in call.items() if key not in free}
    bound = lz.bind(op, *[GOOD[op][key] for key in free], **fixed)
    with pytest.raises(ValueError, match=f"^{name} needs"):
        bound(*[call[key] for key in free])

    async def alone() -> None:
        for _ in range(3):
            with pytest.raises(ValueError, match=f"^{name} needs"):
                await getattr(lz, op)(**call)

    asyncio.run(alone())
    assert not spy.seen
    assert all(torch.equal(call[key].nan_to_num(), held.nan_to_num()) for key, held in before.items())
    assert runtime.device("cpu").counters.total("failures") == 0
    assert runtime.device("cpu").counters.total("fallbacks") == 0


@pytest.mark.parametrize(("op", "name", "number"), WRONG)
def test_bad_data_in_company_fails_alone(runtime: Runtime, op: str, name: str, number: int) -> None:
    """The neighbours of a caller with bad data have their answers, every time."""

    async def crowd() -> None:
        for _ in range(3):
            calls = [fresh(op), wrong(op, name, number), fresh(op)]
            if op.endswith("append_kv"):  # one pool for all, places of each caller's own
                calls[1] |= {key: calls[0][key] for key in ("k_cache", "v_cache")}
            outcomes = await asyncio.gather(
                *[getattr(lz, op)(**one) for one in calls], return_exceptions=True
            )
            assert isinstance(outcomes[1], ValueError) and str(outcomes[1]).startswith(f"{name} needs")
            for index in (0, 2):
                assert not isinstance(outcomes[index], BaseException), outcomes[index]
                assert same(answer(op, calls[index], outcomes[index]), wanted)

    own = fresh(op)
    wanted = answer(op, own, getattr(lz.sync, op)(**own))
    asyncio.run(crowd())
    assert runtime.device("cpu").counters.total("failures") == 0


# What is checked with the whole batch is the caller's to change until then.
WAYS = [
    (way, op)
    for way in ("blocking", "alone", "in company", "known", "waiting")
    for op in OPS
    if way != "waiting" or not table.get(op).validate_values_per_batch
]


@pytest.mark.parametrize(("way", "op"), WAYS)
def test_what_was_checked_is_what_is_read(runtime: Runtime, way: str, op: str) -> None:
    """A caller that writes over its ids, tables, lengths or offsets changes no answer.

    While a kernel runs, or, "waiting", once its call stands in line.
    """
    own = fresh(op)
    wanted = answer(op, own, getattr(lz.sync, op)(**own))
    spy = Spy(runtime, op)
    mine: list[Call] = []

    def scribble() -> None:
        for call in mine:
            for name in INDICES[op]:
                call[name].fill_(2_000_000_000)

    async def awaited(count: int) -> list[Any]:
        async def overwrite() -> None:
            if way == "waiting":
                scribble()

        calls = [getattr(lz, op)(**one) for one in mine[:count]]
        return (await asyncio.gather(*calls, overwrite()))[:-1]

    async def rounds() -> None:
        for _ in range(3 if way in ("known", "waiting") else 1):
            mine[:] = [fresh(op) for _ in range(1 if way == "alone" else 3)]
            spy.first = scribble
            for call, result in zip(mine, await awaited(len(mine)), strict=True):
                assert same(answer(op, call, result), wanted)

    if way == "blocking":
        mine[:] = [fresh(op)]
        spy.first = scribble
        assert same(answer(op, mine[0], getattr(lz.sync, op)(**mine[0])), wanted)
    else:
        asyncio.run(rounds())
    assert spy.seen and all(int(call[name].max()) == 2_000_000_000 for call in mine for name in INDICES[op])
    tensors = [value for args in spy.seen for value in args if isinstance(value, Tensor)]
    read = [value for value in tensors if not value.is_floating_point()]
    assert not [
        value for value in read if not value.is_floating_point() and int(value.max()) == 2_000_000_000
    ]


@pytest.mark.parametrize("op", OPS)
def test_every_op_that_reads_indices_has_a_guard(op: str) -> None:
    """And no op without one takes whole numbers as tensors, the codes of quantized rows aside.

    The guards of attention, of quantize and of products of codes look at scales and zero points alone.
    """
    assert table.get(op).validate_values is not None
    guarded = {name for name in table.FILES if table.get(name).validate_values is not None}
    of_scales = {"attention", "dequantize", "quantize", "quantized_linear", "fused_experts"}
    assert guarded - of_scales == set(GOOD) == set(BAD)


def test_torchs_compiler_sees_one_program(runtime: Runtime) -> None:
    """A guard reads data, which would cut a compiled program in two."""
    ids, weight = GOOD["embedding"]["ids"], GOOD["embedding"]["weight"]
    lz.sync.embedding(ids, weight)
    told = torch._dynamo.explain(lambda *tensors: lz.sync.embedding(*tensors))(ids, weight)
    assert told.graph_count == 1 and told.graph_break_count == 0


@pytest.mark.parametrize("op", OPS)
def test_fake_tensors_and_transforms_are_not_read(op: str) -> None:
    """Nothing there has data; the arguments come back as they are."""
    guard: Any = table.get(op).validate_values
    call = fresh(op)
    with FakeTensorMode() as mode:
        fake = {n: mode.from_tensor(v) if isinstance(v, Tensor) else v for n, v in call.items()}
        args = table.get(op).build(**fake)[1]
        assert all(given is own for given, own in zip(guard(args), args, strict=True))

    def seen(tensor: Tensor) -> Tensor:
        args = table.get(op).build(**{**fresh(op), name: tensor})[1]
        assert id(guard(args)[position]) == id(tensor)
        return tensor

    names = list(inspect.signature(table.get(op).build).parameters)
    for name in INDICES[op]:
        position = names.index(name)
        torch.func.vmap(seen)(GOOD[op][name].unsqueeze(0))
