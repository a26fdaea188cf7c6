"""Every op as an operator of torch: torch's own checks of it, its numbers, gradients and surroundings."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

import layerzero as lz
from layerzero import operators
from layerzero.ops import table
from tests import children
from tests.backends import cases
from tests.operators.calls import OperatorCall, call_of, calls
from tests.ops.calls import parts

OPS = table.names()
DIFFERENTIABLE = [name for name in OPS if table.get(name).differentiable]


@pytest.fixture(autouse=True)
def settled() -> Iterator[None]:
    """A choice that does not change when something has been loaded in the background."""
    with lz.start(lz.Settings(warm="off")):
        yield


every_op = pytest.mark.parametrize("name", OPS)
EIGHT_BITS = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu)


def has_eight_bit_floats(call: OperatorCall) -> bool:
    """Whether an argument or an output is of a type that torch's check of schemas cannot compare."""
    dtypes = {getattr(torch, spec.dtype) for spec in call.op.outputs(call.full)}
    dtypes |= {value.dtype for value in call.full if isinstance(value, Tensor)}
    inside = any(isinstance(value, str) and value.startswith("fp8") for value in call.full)
    return inside or not dtypes.isdisjoint(EIGHT_BITS)


def plain(call: OperatorCall) -> Any:
    """What `lz.sync` gives for a call."""
    return getattr(lz.sync, call.op.name)(**call.named())


def test_every_op_is_an_operator() -> None:
    """By its name, and one more for each op that may return the logarithm of a sum."""
    defined = set(operators.define_all())
    assert set(OPS) <= defined
    assert {name for name in defined if name.endswith("_with_lse")} == {
        f"{name}_with_lse" for name in OPS if name.endswith("attention")
    }
    assert not hasattr(torch.ops.layerzero, "no_such_op")


def test_threads_that_ask_for_an_operator_at_once_get_one(tmp_path: Path) -> None:
    """Whoever is first defines it; in a process of its own, since an operator is defined once."""
    code = """
import threading, torch, layerzero
gate, got = threading.Barrier(8), []
def ask():
    gate.wait()
    got.append(torch.ops.layerzero.mlp)
threads = [threading.Thread(target=ask) for _ in range(8)]
for thread in threads: thread.start()
for thread in threads: thread.join()
assert len(got) == 8 and len(set(map(id, got))) == 1
"""
    done = children.run(code, folder=tmp_path)
    assert done.returncode == 0, done.stderr


@every_op
def test_torch_finds_nothing_wrong_with_the_operator(name: str) -> None:
    """`opcheck`: the schema says what is changed, autograd is registered, fakes are like results."""
    tests = ("test_autograd_registration", "test_faketensor")
    seen = 0
    for call in calls(name):
        schema = () if has_eight_bit_floats(call) else ("test_schema",)
        checked = torch.library.opcheck(call.operator, call.flat, test_utils=(*schema, *tests))
        assert set(checked.values()) == {"SUCCESS"}
        seen += 1
    assert seen >= 2


@every_op
def test_a_traced_operator_has_the_numbers_and_gradients_of_the_eager_one(name: str) -> None:
    """`opcheck` through ahead-of-time autograd, with every size a symbol."""
    call = call_of(cases.Case(name), grad=name in DIFFERENTIABLE)
    assert call is not None
    wants_gradient = any(a.requires_grad for a in call.flat if isinstance(a, Tensor))
    assert wants_gradient is (name in DIFFERENTIABLE)
    checked = torch.library.opcheck(call.operator, call.flat, test_utils="test_aot_dispatch_dynamic")
    assert set(checked.values()) == {"SUCCESS"}


@every_op
def test_an_operator_gives_what_the_op_gives(name: str) -> None:
    """In numbers, to the bit where the op is deterministic, and what is written is written."""
    for call in calls(name):
        if call.op.writes:
            before = [call.full[at].clone() for at in call.op.written(call.full)]
            result = plain(call)
            wanted = [call.full[at].clone() for at in call.op.written(call.full)]
            for at, value in zip(call.op.written(call.full), before, strict=True):
                call.full[at].copy_(value)
            given = call.operator(*call.flat)
            got = [call.full[at] for at in call.op.written(call.full)]
            assert (given is None) == (call.schema.outputs == 0)
            if given is not None:
                wanted, got = [*wanted, *parts(result)], [*got, *parts(given)]
        else:
            wanted, got = list(parts(plain(call))), list(parts(call.operator(*call.flat)))
            # Compiled code takes results for memory of its own, and writes over what it has read.
            lent = {at.untyped_storage().data_ptr() for at in call.full if isinstance(at, Tensor)}
            assert lent.isdisjoint({out.untyped_storage().data_ptr() for out in got if out.numel()})
        assert len(wanted) == len(got)
        assert all(
            torch.equal(a.view(torch.int8), b.view(torch.int8))
            if a.dtype in EIGHT_BITS
            else torch.equal(a, b)
            for a, b in zip(wanted, got, strict=True)
        )


@pytest.mark.parametrize("name", sorted(set(OPS) - set(DIFFERENTIABLE)))
def test_an_op_without_a_gradient_refuses_one_by_name(name: str) -> None:
    """Of the op and of the first operand that wants one, eager and traced alike."""
    call = call_of(cases.Case(name))
    assert call is not None
    flat = tuple(
        a.clone().requires_grad_() if isinstance(a, Tensor) and a.is_floating_point() else a
        for a in call.flat
    )
    named = zip(inspect.signature(table.get(name).build).parameters, flat, strict=False)
    first = next(each for each, value in named if isinstance(value, Tensor) and value.requires_grad)
    said = rf"{name} has no gradient: {first} needs to require none \({first}.detach\(\), .* requires grad"
    with pytest.raises(ValueError, match=said):
        call.operator(*flat)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fakes = tuple(mode.from_tensor(a) if isinstance(a, Tensor) else a for a in flat)
    with pytest.raises(ValueError, match=said):
        call.operator(*fakes)


def test_a_wrong_argument_is_named() -> None:
    """As the op itself names it; what is no tensor torch names."""
    x, weight = torch.randn(3, 8), torch.randn(7)
    with pytest.raises(ValueError, match="weight needs 8 elements"):
        torch.ops.layerzero.rms_norm(x, weight)
    with pytest.raises(ValueError, match="ids needs ids in"):
        torch.ops.layerzero.embedding(torch.tensor([0, 11]), torch.randn(11, 6))
    with pytest.raises(RuntimeError, match="argument 'x'"):
        torch.ops.layerzero.rms_norm("x")
    with pytest.raises(lz.LayerZeroError, match=r"no\.such\.kernel"):
        torch.ops.layerzero.rms_norm(x, backend="no.such.kernel")


def test_a_seed_of_any_size_draws_as_the_op_does() -> None:
    """Of an int the low 64 bits count, also where torch's schemas hold fewer."""
    logits = torch.randn(5, 40, generator=torch.Generator().manual_seed(0))
    for seed in (3, -3, (1 << 64) - 5, (1 << 200) + 17):
        traced = torch.compile(lz.sync.sample, fullgraph=True, backend="eager")
        assert torch.equal(traced(logits, seed=seed), lz.sync.sample(logits, seed=seed))


def test_without_a_seed_torchs_generator_repeats_a_program() -> None:
    """The operator draws its seed from the generator that `torch.manual_seed` sets, once a call."""
    logits = torch.zeros(64, 1000)
    drawn = []
    for _ in range(2):
        torch.manual_seed(11)
        drawn.append([torch.ops.layerzero.sample(logits) for _ in range(2)])
    assert torch.equal(drawn[0][0], drawn[1][0]) and torch.equal(drawn[0][1], drawn[1][1])
    assert not torch.equal(drawn[0][0], drawn[0][1])


@pytest.mark.parametrize("name", sorted(set(OPS) - {"append_kv", "rope_append_kv"}))
def test_autocast_casts_what_torch_casts(name: str) -> None:
    """Attention and products round, a loss does not, everything else is as without; fakes say the same."""
    call = call_of(cases.Case(name))
    assert call is not None
    mode = FakeTensorMode()
    fakes = [mode.from_tensor(a) if isinstance(a, Tensor) else a for a in call.flat]
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        got, shapes = parts(call.operator(*call.flat)), parts(call.operator(*fakes))
    with torch.no_grad():
        exact = parts(call.operator(*call.flat))
    rounds = name in ("attention", "linear", "mlp", "rms_norm_linear")
    for out, fake, wanted in zip(got, shapes, exact, strict=True):
        assert out.dtype is fake.dtype is (torch.bfloat16 if rounds else wanted.dtype)
        if out.dtype.is_floating_point and out.itemsize > 1:
            torch.testing.assert_close(out.float(), wanted.float(), rtol=3e-2, atol=3e-2)


@pytest.mark.parametrize("name", ["attention", "cross_entropy", "layer_norm", "linear", "mlp", "rms_norm"])
def test_under_autocast_an_operator_is_the_op_under_autocast(name: str) -> None:
    """As far as torch has the function, both have its dtype; float64 keeps its own, as in torch."""
    call = call_of(cases.Case(name))
    assert call is not None
    wide = [a.double() if isinstance(a, Tensor) and a.is_floating_point() else a for a in call.flat]
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        assert call.operator(*call.flat).dtype is plain(call).dtype
        assert call.operator(*wide).dtype is torch.float64


def test_vmap_joins_rows_and_otherwise_takes_slices() -> None:
    """One call of the operator where the op has room for an axis, one a slice elsewhere; numbers agree."""
    weight = torch.randn(8)
    x, many = torch.randn(3, 5, 8), torch.randn(3, 8)
    q = torch.randn(3, 2, 4, 7, 8)
    slopes = torch.rand(2, 4)
    runs: tuple[tuple[Any, Any], ...] = (
        (lambda x: lz.sync.rms_norm(x, weight), (x,)),
        (lambda x, w: lz.sync.rms_norm(x, w), (x, many)),
        (lambda x: lz.sync.add_rms_norm(x, x, weight), (x,)),
        (lambda q: lz.sync.attention(q, q, q, is_causal=True), (q,)),
        (lambda q: lz.sync.attention(q, q, q, alibi_slopes=slopes, return_lse=True), (q,)),
        (lambda q: lz.sync.attention(q, q, q, attn_mask=torch.ones(2, 1, 7, 7).tril().bool()), (q,)),
        (lambda x: lz.sync.quantize(x)[1], (x,)),
    )
    for run, given in runs:
        wanted = [run(*(g[i] for g in given)) for i in range(3)]
        for got, *slices in zip(parts(torch.vmap(cast(Any, run))(*given)), *map(parts, wanted), strict=True):
            torch.testing.assert_close(got, torch.stack(slices))
    with pytest.raises(ValueError, match=r"append_kv changes its arguments, and torch\.vmap needs"):
        pools = torch.zeros(3, 4, 8, 2, 6)
        torch.vmap(lz.sync.append_kv, in_dims=(0, 0, 0, 0, None))(
            torch.zeros(3, 1, 2, 6), torch.zeros(3, 1, 2, 6), pools, pools.clone(), torch.tensor([1])
        )
    with pytest.raises(RuntimeError, match="sample draws from torch's generator: pass a seed"):
        torch.vmap(lz.sync.sample)(torch.randn(3, 2, 9))
    drawn = torch.vmap(lz.sync.sample, randomness="different")(torch.zeros(3, 2, 99999))
    assert len(set(drawn.flatten().tolist())) == 6


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_transforms_of_functions_differentiate_the_operator() -> None:
    """grad, vmap of grad, jvp and a hessian of calls through `lz.sync` and through the operator."""
    x, weight = torch.randn(3, 5, 8, dtype=torch.float64), torch.randn(8, dtype=torch.float64)

    def wanted(x: Tensor) -> Tensor:
        return torch.nn.functional.rms_norm(x, (8,), weight, 1e-6).square().sum()

    for rms_norm in (lz.sync.rms_norm, torch.ops.layerzero.rms_norm):

        def loss(x: Tensor, rms_norm: Any = rms_norm) -> Any:
            return rms_norm(x, weight, eps=1e-6).square().sum()

        torch.testing.assert_close(torch.func.grad(loss)(x), torch.func.grad(wanted)(x))
        torch.testing.assert_close(
            torch.vmap(torch.func.grad(loss))(x), torch.vmap(torch.func.grad(wanted))(x)
        )
        torch.testing.assert_close(torch.func.jvp(loss, (x,), (x,)), torch.func.jvp(wanted, (x,), (x,)))
        torch.testing.assert_close(torch.func.hessian(loss)(x[0]), torch.func.hessian(wanted)(x[0]))
        torch.testing.assert_close(
            torch.func.grad(lambda x: torch.vmap(loss)(x).sum())(x), torch.func.grad(wanted)(x)
        )
