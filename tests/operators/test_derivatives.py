"""Every op that has a gradient, under each of torch's ways to differentiate and to map, beside float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vmap
from torch.nn import functional

import layerzero as lz
from layerzero.ops import table
from tests.ops.calls import parts

TABLES, LENGTHS = torch.tensor([[1, 0]], dtype=torch.int32), torch.tensor([3], dtype=torch.int32)
STARTS = torch.tensor([0, 1, 3], dtype=torch.int32)
TARGET, IDS = torch.tensor([2, 0]), torch.tensor([[2, 0, 2]])
ANGLES = torch.tensor([[0.3, 1.1], [0.7, -0.4]])
# As torch's own attention on the CPU, which computes it.
FIRST_ONLY = frozenset({"attention"})


class Case(NamedTuple):
    """An op's call and its formula, both of tensors of these shapes."""

    ours: Callable[..., Any]
    formula: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...]


def attended(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    """Attention over (..., S, D), the last query on the last key."""
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).tril(k.shape[-2] - q.shape[-2])
        scores = scores.masked_fill(~hidden, -torch.inf)
    out: Tensor = scores.softmax(-1) @ v
    return out


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight


def swiglu(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    gate, value = (x @ up.T).chunk(2, -1)
    return (gate * gate.sigmoid() * value) @ down.T


def experts(x: Tensor, router: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """All experts, as many as are chosen: their scores are the softmax of all."""
    scores = router.softmax(-1)
    answers = torch.stack([swiglu(x, up[i], down[i]) for i in range(len(up))], -1)
    return (answers * scores[:, None]).sum(-1)


def turned(x: Tensor) -> Tensor:
    """(B, S, H, 4) by the angles of two positions."""
    cos, sin = (table.to(x.dtype)[None, :, None] for table in (ANGLES.cos(), ANGLES.sin()))
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def paged(q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """One query over the first three keys of pages 1 and 0, of two keys each."""
    k, v = (pool[[1, 0]].reshape(4, 1, 2)[:3].transpose(0, 1) for pool in (keys, values))
    return attended(q.transpose(0, 1), k, v).transpose(0, 1)


def latent(q_nope: Tensor, q_pe: Tensor, ckv: Tensor, kpe: Tensor) -> Tensor:
    """One query over three latent rows, which are keys and values."""
    rows, rotary = (pool[[1, 0]].reshape(4, -1)[:3] for pool in (ckv, kpe))
    scores = (q_nope @ rows.T + q_pe @ rotary.T) * 0.5
    return scores.softmax(-1) @ rows


def ragged(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    each = [attended(q[:, s], k[:, s], v[:, s]) for s in (slice(0, 1), slice(1, 3))]
    return torch.cat(each, 1).transpose(0, 1)


def normed(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return functional.layer_norm(x, x.shape[-1:], weight, bias, 1e-5)


HEADS, ROWS = (1, 1, 2, 2), (2, 3)
CASES = {
    "add_layer_norm": Case(
        lz.sync.add_layer_norm, lambda x, r, w, b: (normed(x + r, w, b), x + r), (ROWS, ROWS, (3,), (3,))
    ),
    "add_rms_norm": Case(
        lz.sync.add_rms_norm, lambda x, r, w: (rms(x + r, w), x + r), (ROWS, ROWS, (3,))
    ),
    "alibi": Case(
        lambda slopes: lz.sync.alibi(slopes, 2, 3),
        lambda s: -s[:, None, None] * torch.tensor([[1, 0, 1], [2, 1, 0]]),
        ((2,),),
    ),
    "attention": Case(
        lambda q, k, v: lz.sync.attention(q, k, v, is_causal=True),
        lambda q, k, v: attended(q, k, v, causal=True),
        (HEADS, HEADS, HEADS),
    ),
    "cross_entropy": Case(
        lambda x: lz.sync.cross_entropy(x, TARGET),
        lambda x: -x.log_softmax(-1)[torch.arange(2), TARGET].mean(),
        (ROWS,),
    ),
    "embedding": Case(lambda w: lz.sync.embedding(IDS, w), lambda w: w[IDS], (ROWS[::-1],)),
    "layer_norm": Case(lz.sync.layer_norm, normed, (ROWS, (3,), (3,))),
    "linear": Case(lz.sync.linear, lambda x, w, b: x @ w.T + b, (ROWS, ROWS, (2,))),
    "linear_cross_entropy": Case(
        lambda x, w: lz.sync.linear_cross_entropy(x, w, TARGET),
        lambda x, w: -(x @ w.T).log_softmax(-1)[torch.arange(2), TARGET].mean(),
        (ROWS, (3, 3)),
    ),
    "mla_attention": Case(
        lambda q, p, c, r: lz.sync.mla_attention(q, p, c, r, TABLES, LENGTHS, scale=0.5),
        latent,
        ((1, 2, 2), (1, 2, 2), (2, 2, 2), (2, 2, 2)),
    ),
    "mlp": Case(lz.sync.mlp, swiglu, (ROWS, (4, 3), (3, 2))),
    "moe": Case(lz.sync.moe, experts, (ROWS, (2, 2), (2, 4, 3), (2, 3, 2))),
    "paged_attention": Case(
        lambda q, k, v: lz.sync.paged_attention(q, k, v, TABLES, LENGTHS),
        paged,
        ((1, 1, 2), (2, 2, 1, 2), (2, 2, 1, 2)),
    ),
    "ragged_attention": Case(
        lambda q, k, v: lz.sync.ragged_attention(q, k, v, STARTS), ragged, ((3, 1, 2),) * 3
    ),
    "rms_norm": Case(lz.sync.rms_norm, rms, (ROWS, (3,))),
    "rms_norm_linear": Case(
        lz.sync.rms_norm_linear, lambda x, n, w: rms(x, n) @ w.T, (ROWS, (3,), (2, 3))
    ),
    "rope": Case(
        lambda q, k: lz.sync.rope(q, k, torch.arange(2)[None], ANGLES.cos(), ANGLES.sin()),
        lambda q, k: (turned(q), turned(k)),
        ((1, 2, 1, 4), (1, 2, 1, 4)),
    ),
}  # fmt: skip


def loss_of(call: Callable[..., Any]) -> Callable[..., Tensor]:
    """A number that curves in every output."""
    return lambda *given: sum((out.sin() * (i + 1)).sum() for i, out in enumerate(parts(call(*given))))  # type: ignore[return-value]


def twice(loss: Callable[..., Tensor], *given: Tensor) -> tuple[Tensor, ...]:
    """The gradient of the gradient's sum of squares, by autograd."""
    leaves = [x.clone().requires_grad_() for x in given]
    first = torch.autograd.grad(loss(*leaves), leaves, create_graph=True)
    squares: Any = sum(g.square().sum() for g in first)
    return torch.autograd.grad(squares, leaves, allow_unused=True, materialize_grads=True)


def forward_dual(loss: Callable[..., Tensor], *given: Tensor) -> Any:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(loss(*(forward_ad.make_dual(x, x.cos()) for x in given))).tangent


def ways(loss: Callable[..., Tensor], count: int) -> dict[str, Callable[..., Any]]:
    """Each way to differentiate a function of `count` tensors, or to map it over two of each."""
    every = tuple(range(count))

    def two(*given: Tensor) -> list[Tensor]:
        return [torch.stack((x, x.flip(0))) for x in given]

    return {
        "grad": grad(loss, every),
        "jvp": lambda *given: jvp(loss, given, tuple(x.cos() for x in given)),
        "jacrev": jacrev(loss, every),
        "jacfwd": jacfwd(loss, every),
        "hessian": hessian(loss),
        "vmap": lambda *given: vmap(loss)(*two(*given)),
        "vmap of grad": lambda *given: vmap(grad(loss, every))(*two(*given)),
        "grad of vmap": grad(lambda *given: vmap(loss)(*two(*given)).sum(), every),
        "forward": lambda *given: forward_dual(loss, *given),
        "twice": lambda *given: twice(loss, *given),
    }


def named(way: str) -> Callable[[str], str]:
    """What is said of numbers that differ."""
    return lambda text: f"{way}: {text}"


def test_every_op_with_a_gradient_is_here() -> None:
    """None is left out."""
    assert set(CASES) == {name for name in table.names() if table.get(name).differentiable}


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("name", CASES)
def test_an_op_is_differentiated_and_mapped_as_its_formula(name: str) -> None:
    """In float32, beside the formula in float64."""
    case = CASES[name]
    generator = torch.Generator().manual_seed(0)
    given = [torch.randn(shape, generator=generator) for shape in case.shapes]
    wanted = ways(loss_of(case.formula), len(given))
    for way, ours in ways(loss_of(case.ours), len(given)).items():
        exact = wanted[way](*(x.double() for x in given))
        if way == "twice" and name in FIRST_ONLY:
            with pytest.raises(RuntimeError, match="derivative"):
                ours(*given)
            continue
        torch.testing.assert_close(
            ours(*given),
            exact,
            check_dtype=False,
            rtol=1e-4,
            atol=1e-5,
            msg=named(way),
        )
