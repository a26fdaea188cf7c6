"""Products with kept panels: right in every layout, and never those of a weight that is another by now."""

from __future__ import annotations

import gc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from layerzero.backends.native import load_module, packed, products, rows
from layerzero.ops import table
from layerzero.ops.linear import kept_weights
from layerzero.ops.op import Args
from layerzero.spec import tolerances
from layerzero.spec.kernel import Kernel, rejections
from tests.backends import cases

LINEAR, NORMED, MLP = map(cases.of_any_vendor, packed.KERNELS)
MISSING = cases.why_not_here(LINEAR)
pytestmark = [
    *cases.COMPILED,
    pytest.mark.skipif(bool(MISSING), reason=MISSING or "runs here"),
]


def ran(kernel: Kernel, *args: object) -> tuple[Tensor, list[str]]:
    """The kernel's result, and how it differs from the reference in float64 as the weight is now."""
    op = table.get(kernel.op)
    assert rejections(kernel, op.check(args), cases.HERE) == []
    out: Tensor = kernel.load()(*args)
    truth = op.reference(*cases.widened(args))
    return out, tolerances.mismatches(out, truth, op.reference(*args))


def wrong(kernel: Kernel, *args: object) -> list[str]:
    """How the kernel's result differs."""
    return ran(kernel, *args)[1]


def right(kernel: Kernel, *args: object) -> Tensor:
    """The kernel's result, which does not differ."""
    out, differs = ran(kernel, *args)
    assert differs == []
    return out


def kept_of(limit: int = 1 << 30) -> kept_weights.PackedWeights:
    native = load_module(products.LIBRARY)
    return kept_weights.PackedWeights(native.pack, limit, 4, [], native.equal)


HALF = (torch.bfloat16, torch.float16)
SIZES = [(1, 1, 1), (1, 16, 384), (5, 15, 383), (7, 33, 64), (95, 48, 800), (193, 31, 769)]


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("activation", ["gelu", "silu", "swiglu"])
def test_products_are_right_from_the_first_call_on(size: tuple[int, int, int], activation: str) -> None:
    """The call that lays the weight out and those that find it give the same bits, within tolerance."""
    torch.manual_seed(0)
    rows, columns, inner = size
    x, weight = torch.randn(rows, inner), torch.randn(columns, inner) * inner**-0.5
    bias = torch.randn(columns)
    assert torch.equal(right(LINEAR, x, weight, bias), right(LINEAR, x, weight, bias))
    up = torch.randn(2 * columns if activation == "swiglu" else columns, inner) * inner**-0.5
    down = torch.randn(inner, columns) * columns**-0.5
    call = (x, up, down, torch.randn(up.shape[0]), None, activation)
    assert torch.equal(right(MLP, *call), right(MLP, *call))


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
def test_products_in_groups_have_the_bits_of_each_alone(dtype: torch.dtype, threads: int) -> None:
    """Rows with several weights in one launch; it leaves a weight that was changed behind torch's back."""
    torch.manual_seed(0)
    linear, counts, before = LINEAR.load(), [1, 5, 2, 13], torch.get_num_threads()
    grouped: Callable[..., Tensor | None] = vars(linear)["is_product"]
    weights, x = [torch.randn(33, 40).to(dtype) for _ in counts], torch.randn(sum(counts), 40).to(dtype)

    def alone() -> Tensor:
        return torch.cat([linear(part, w, None) for part, w in zip(x.split(counts), weights, strict=True)])

    torch.set_num_threads(threads)
    try:
        for _ in range(2):
            out = grouped(x, counts, weights)
            assert out is not None and out.dtype is dtype and torch.equal(out, alone())
        weights[2].data.mul_(2)
        assert grouped(x, counts, weights) is None
        expected = alone()
        again = grouped(x, counts, weights)
        assert again is not None and torch.equal(again, expected)
    finally:
        torch.set_num_threads(before)
    with pytest.raises(RuntimeError, match="linear_grouped needs rows for its weights"):
        grouped(x, [1, 1, 1, 1], weights)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_half_precision_is_widened_once_and_rounded_once(
    size: tuple[int, int, int], dtype: torch.dtype
) -> None:
    """The result is that of float32, rounded; the weight is not cast again at the next call."""
    torch.manual_seed(6)
    rows, columns, inner = size
    x, weight = torch.randn(rows, inner).to(dtype), (torch.randn(columns, inner) * inner**-0.5).to(dtype)
    bias = torch.randn(columns).to(dtype)
    wide = LINEAR.load()(x.float(), weight.float(), bias.float())
    assert torch.equal(right(LINEAR, x, weight, bias), wide.to(dtype))
    kept = kept_of()
    assert kept.of(weight) is kept.of(weight) is not None
    down = (torch.randn(inner, columns) * columns**-0.5).to(dtype)
    for activation in ("gelu", "silu"):
        assert wrong(MLP, x, weight, down, bias, None, activation) == []


@pytest.mark.parametrize("dtype", HALF)
def test_half_precision_is_followed_and_told_apart(dtype: torch.dtype) -> None:
    """Edits behind torch's back, and other dtypes over the same bits."""
    torch.manual_seed(7)
    x, weight = torch.randn(5, 64).to(dtype), torch.randn(48, 64).to(dtype)
    assert wrong(LINEAR, x, weight, None) == []
    weight.data.mul_(-1)
    assert wrong(LINEAR, x, weight, None) == []
    other = next(each for each in HALF if each is not dtype)
    bits = torch.randn(48, 64).to(dtype).clamp(0.5, 1.5)
    assert wrong(LINEAR, x, bits, None) == []
    assert wrong(LINEAR, (x * 1e-3).to(other), bits.view(other), None) == []


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("with_weight", [True, False])
def test_a_norm_in_front_gives_the_bits_of_the_two_kernels(
    size: tuple[int, int, int], with_weight: bool
) -> None:
    """In float32 fusing changes no bit; half precision is not rounded in between; weights may change."""
    torch.manual_seed(8)
    count, columns, inner = size
    x, weight = torch.randn(count, inner), torch.randn(columns, inner) * inner**-0.5
    bias, scale = torch.randn(columns), torch.rand(inner) if with_weight else None
    norm = next(kernel for kernel in rows.KERNELS if kernel.op == "rms_norm").load()
    for _ in range(2):
        wanted = LINEAR.load()(norm(x, scale, 1e-5), weight, bias)
        assert torch.equal(right(NORMED, x, scale, weight, bias, 1e-5), wanted)
        if scale is not None:
            scale.mul_(-2)
    weight.data.mul_(-1)
    assert wrong(NORMED, x, scale, weight, bias, 1e-5) == []
    for dtype in HALF:
        half = [None if each is None else each.to(dtype) for each in (x, scale, weight, bias)]
        assert wrong(NORMED, *half, 1e-5) == []


def strided(weight: Tensor) -> Tensor:
    """The same numbers with a neighbour behind each of them."""
    wide = torch.randn(*weight.shape, 2)
    wide[..., 0] = weight
    return wide[..., 0]


def transposed(weight: Tensor) -> Tensor:
    return weight.t().contiguous().t()


def offset(weight: Tensor) -> Tensor:
    """The middle of a larger matrix."""
    big = torch.randn(weight.shape[0] + 5, weight.shape[1] + 3)
    big[3:-2, 1:-2] = weight
    return big[3:-2, 1:-2]


def negated(weight: Tensor) -> Tensor:
    """A view that only a flag negates."""
    view: Tensor = torch.ops.aten._neg_view(-weight)
    return view


@pytest.mark.parametrize("seen", [strided, transposed, offset, negated])
def test_operands_are_read_as_they_read(seen: Callable[[Tensor], Tensor]) -> None:
    """Views, offsets and strides of every operand give what dense operands give."""
    torch.manual_seed(1)
    x, weight = torch.randn(9, 70), torch.randn(40, 70)
    wanted = torch.nn.functional.linear(x, weight)
    for args in ((seen(x), weight), (x, seen(weight)), (seen(x), seen(weight))):
        for _ in range(2):
            out = LINEAR.load()(*args, None)
            torch.testing.assert_close(out, wanted, rtol=1e-4, atol=1e-4)


def test_views_of_one_matrix_are_weights_of_their_own() -> None:
    """Slices that begin at one address, or share it with the whole, are told apart."""
    torch.manual_seed(2)
    whole, x = torch.randn(96, 64), torch.randn(3, 64)
    for _ in range(2):
        for weight in (whole, whole[:48], whole[48:], whole.view(192, 32), whole[::2]):
            assert wrong(LINEAR, x[:, : weight.shape[1]], weight, None) == []


def test_a_product_follows_its_weight() -> None:
    """Weights edited in place, behind torch's back, replaced, or made anew at the same address."""
    torch.manual_seed(3)
    edits: list[Callable[[Tensor], object]] = [
        lambda weight: weight.add_(1),
        lambda weight: weight[7:9].zero_(),
        lambda weight: weight[:, 5].fill_(3),
        lambda weight: weight[2, 9].add_(1),
        lambda weight: weight.data.mul_(-2),
        lambda weight: weight.data[3].zero_(),
        lambda weight: weight.numpy().fill(0.5),
        lambda weight: setattr(weight, "data", torch.randn(48, 64)),
        lambda weight: torch.optim.SGD([weight], lr=1.0).step(),
    ]
    for _ in range(3):
        x, weight = torch.randn(32, 64), torch.randn(48, 64)
        weight.grad = torch.randn(48, 64)
        for edit in edits:
            assert wrong(LINEAR, x, weight, None) == []
            edit(weight)
            assert wrong(LINEAR, x, weight, None) == []
            assert wrong(MLP, x, weight, torch.randn(64, 48), None, None, "gelu") == []
        del x, weight


FUSED = ("SGD", "Adam", "AdamW", "Adagrad")


@pytest.mark.parametrize("name", FUSED)
@pytest.mark.parametrize("seen", [lambda weight: weight, torch.Tensor.detach], ids=["itself", "detached"])
def test_a_step_of_a_fused_optimizer_is_seen(name: str, seen: Callable[[Tensor], Tensor]) -> None:
    """torch counts no version for it; here it changes one column, which no compared element stands in."""
    weight, x = torch.nn.Parameter(torch.randn(48, 64)), torch.zeros(3, 64)
    x[:, 1] = 10.0
    kept, optimizer = packed.packed_weights(), getattr(torch.optim, name)([weight], lr=1.0, fused=True)
    with torch.no_grad():
        assert wrong(LINEAR, x, seen(weight), None) == []
        before, version = kept.of(seen(weight)), weight._version
        weight.grad = torch.zeros(48, 64)
        weight.grad[0, 1] = 5.0
        optimizer.step()
        assert weight._version == version, "torch counts fused steps now: the hook is no longer needed"
        assert wrong(LINEAR, x, seen(weight), None) == []
        assert kept.of(seen(weight)) is not before


def test_a_step_over_other_memory_forgets_nothing() -> None:
    """A small model that learns beside a large one that serves costs the large one nothing."""
    weight, other = torch.randn(48, 64), torch.nn.Parameter(torch.randn(8, 8))
    panels, other.grad = packed.packed_weights().of(weight), torch.ones(8, 8)
    torch.optim.SGD([other], lr=0.1, fused=True).step()
    assert packed.packed_weights().of(weight) is panels is not None


def test_another_tensor_over_the_memory_is_compared() -> None:
    """`.data` counts changes by itself: at the same number, other numbers may stand there."""
    x, weight = torch.eye(64), torch.randn(48, 64)
    weight.add_(1)
    assert wrong(LINEAR, x, weight, None) == []
    alias = weight.data
    alias[5, 7].add_(3.0)
    assert alias._version == weight._version
    assert wrong(LINEAR, x, alias, None) == []
    assert wrong(LINEAR, x, weight, None) == []


def test_both_weights_of_a_feed_forward_block_are_followed() -> None:
    """An edit of either one that torch does not count is seen, for plain and for gated activations."""
    torch.manual_seed(4)
    for activation, wide in (("gelu", 80), ("swiglu", 160)):
        x, up, down = torch.randn(5, 64), torch.randn(wide, 64) / 8, torch.randn(64, 80) / 9
        for weight in (up, down):
            assert wrong(MLP, x, up, down, None, None, activation) == []
            weight.data.mul_(-1)
            assert wrong(MLP, x, up, down, None, None, activation) == []


def test_a_weight_is_laid_out_once_for_a_hundred_calls() -> None:
    """And once more after each change."""
    lay_out, made = load_module(products.LIBRARY).pack, list[Tensor]()

    def counted(weight: Tensor) -> Tensor:
        made.append(weight)
        panels: Tensor = lay_out(weight)
        return panels

    kept = kept_weights.PackedWeights(counted, 1 << 30, 4, [], load_module(products.LIBRARY).equal)
    weight = torch.randn(64, 64)
    first = kept.of(weight)
    assert all(kept.of(weight[:]) is first for _ in range(100))
    assert len(made) == 1
    weight.mul_(2)
    assert kept.of(weight) is kept.of(weight)
    assert len(made) == 2


def test_panels_are_freed_with_their_weight() -> None:
    """A view keeps them as it keeps the storage; when that dies, they die without a further call."""
    kept, weight = kept_of(), torch.randn(64, 64)
    view = weight.detach()[:]
    assert kept.of(weight) is kept.of(view)
    assert kept.nbytes == 64 * 64 * 4
    del weight
    gc.collect()
    assert kept.nbytes == 64 * 64 * 4
    del view
    gc.collect()
    assert kept.nbytes == 0


def test_what_does_not_fit_is_left_to_torch() -> None:
    """Beyond the limit nothing is kept, and a weight takes the same way at every call until it changes."""
    kept = kept_of(limit=3 * 64 * 64 * 4)
    weights = [torch.randn(64, 64) for _ in range(4)]
    assert [kept.of(weight) is not None for weight in weights] == [True, True, True, False]
    del weights[0]
    gc.collect()
    assert kept.of(weights[-1]) is None
    weights[-1].add_(1)
    assert kept.of(weights[-1]) is not None
    assert kept.nbytes == 3 * 64 * 64 * 4


def test_remembered_weights_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest is forgotten, and laid out again where it is asked for."""
    monkeypatch.setattr(kept_weights, "MAX_WEIGHTS", 4)
    kept, big = kept_of(), torch.randn(640, 16)
    for at in range(0, 640, 16):
        assert kept.of(big[at : at + 16]) is not None
    one = kept_of().of(torch.randn(16, 16))
    assert one is not None and kept.nbytes == 4 * one.nbytes


def test_weights_of_inference_mode_are_not_kept() -> None:
    """torch does not count their changes; the results are right all the same."""
    with torch.inference_mode():
        x, weight = torch.randn(3, 32), torch.randn(16, 32)
        assert kept_of().of(weight) is None
        for _ in range(2):
            assert wrong(LINEAR, x, weight, None) == []
            weight[0, 0] += 1


def test_a_weight_from_before_inference_mode_is_kept_in_it() -> None:
    """Modules are made outside and run inside."""
    weight, kept = torch.nn.Parameter(torch.randn(16, 32)), kept_of()
    with torch.inference_mode():
        assert kept.of(weight) is kept.of(weight) is not None


@pytest.mark.parametrize("empty", [(0, 8, 4), (3, 8, 0), (3, 0, 4)])
def test_nothing_to_multiply_is_torchs_answer(empty: tuple[int, int, int]) -> None:
    """No rows, no columns, no inner length."""
    rows, columns, inner = empty
    x, weight, bias = torch.randn(rows, inner), torch.randn(columns, inner), torch.randn(columns)
    assert torch.equal(LINEAR.load()(x, weight, bias), torch.nn.functional.linear(x, weight, bias))


def test_threads_share_panels() -> None:
    """Calls of several threads, with weights that are freed beside them, give each its own result."""
    torch.manual_seed(5)
    run = LINEAR.load()

    def one(seed: int) -> bool:
        x, weight = torch.randn(4, 40) + seed, torch.randn(24, 40) - seed
        close = [torch.allclose(run(x, weight, None), x @ weight.t(), rtol=1e-4, atol=1e-2) for _ in range(3)]
        return all(close)

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(one, range(200)))


def test_what_a_call_takes_is_stated() -> None:
    """The panels count as if the call made them; hidden rows and dense copies come on top."""
    op, gated = table.get("linear"), (torch.randn(10, 32), torch.randn(128, 32), torch.randn(32, 64))
    args: Args = (torch.randn(10, 64), torch.randn(40, 64), None)
    assert LINEAR.workspace_bytes is not None and MLP.workspace_bytes is not None
    assert LINEAR.workspace_bytes(op.check(args)) == 64 * 64 * 4
    assert LINEAR.workspace_bytes(op.check((strided(args[0]), *args[1:]))) == (64 + 10) * 64 * 4
    half = tuple(tensor.bfloat16() for tensor in args[:2])
    assert LINEAR.workspace_bytes(op.check((*half, None))) == (64 * 64 + 10 * (64 + 40)) * 4
    request = table.get("mlp").check((*gated, None, None, "swiglu"))
    assert MLP.workspace_bytes(request) == (3 * 64 * 32 + 3 * 10 * 64) * 4
