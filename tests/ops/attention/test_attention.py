"""The attention reference against a loop over scalars, against torch, and its gradient."""

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.testing import assert_close

import layerzero.ops.attention.attention as module
from layerzero.ops.attention.attention import ATTENTION, attention, attention_reference, visible_pairs

INF = math.inf


def score(
    dot: float, away: int, slope: float, mask: Tensor | None, options: dict[str, Any], causal: bool
) -> float:
    """One score from q . k; `away` is how far the key lies behind the diagonal. -inf is hidden."""
    left, right = options.get("window") or (-1, -1)
    cap: float | None = options.get("softcap")
    factor: float = options["factor"]
    if (causal and away > 0) or (left >= 0 and -away > left) or (right >= 0 and away > right):
        return -INF
    s = dot * factor
    if cap is not None:
        s = cap * math.tanh(s / cap)
    if options.get("modified") is not None:
        s = options["modified"](s)
    s -= slope * abs(away)
    if mask is None:
        return s
    return (s if mask else -INF) if mask.dtype is torch.bool else s + float(mask)


def oracle(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    score_mod: Any = None,
    block_mask: Any = None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Attention in float64, one score at a time; BHSD."""
    batch, heads, q_len, width = q.shape
    group, k_len = heads // k.shape[1], k.shape[2]
    options["factor"] = 1 / math.sqrt(width) if scale is None else scale
    mask = None if attn_mask is None else attn_mask.broadcast_to(batch, heads, q_len, k_len)
    slopes = torch.zeros(batch, heads) if alibi_slopes is None else alibi_slopes.expand(batch, heads)
    out = torch.zeros(batch, heads, q_len, v.shape[3], dtype=torch.float64)
    lse = torch.full((batch, heads, q_len), -INF, dtype=torch.float64)
    for b, h, i in itertools.product(range(batch), range(heads), range(q_len)):
        scores = []
        for j in range(k_len):
            dot = float(q[b, h, i].double() @ k[b, h // group, j].double())
            one = None if mask is None else mask[b, h, i, j]
            if score_mod is not None:
                place = [torch.tensor(at) for at in (b, h, i, j)]
                options["modified"] = lambda s, at=place: float(score_mod(torch.tensor(s).double(), *at))
            if block_mask is not None and not sees(block_mask, b, h, i, j):
                scores.append(-INF)
                continue
            scores.append(score(dot, j - (i + k_len - q_len), float(slopes[b, h]), one, options, is_causal))
        total = sum(math.exp(s) for s in scores)
        if sinks is not None:
            total += math.exp(float(sinks[h]))
        if total == 0:
            continue
        lse[b, h, i] = math.log(total)
        for j, s in enumerate(scores):
            out[b, h, i] += math.exp(s) / total * v[b, h // group, j].double()
    return out, lse


def sees(block_mask: Any, b: int, h: int, i: int, j: int) -> bool:
    """What a block mask says of one score: its block is full, or partial and its function agrees."""
    rows, columns = block_mask.BLOCK_SIZE
    at = (min(b, block_mask.shape[0] - 1), min(h, block_mask.shape[1] - 1), i // rows)

    def listed(counts: Any, indices: Any) -> bool:
        return counts is not None and j // columns in indices[at][: int(counts[at])].tolist()

    if listed(block_mask.full_kv_num_blocks, block_mask.full_kv_indices):
        return True
    partly = listed(block_mask.kv_num_blocks, block_mask.kv_indices)
    return partly and bool(block_mask.mask_mod(*(torch.tensor(at) for at in (b, h, i, j))))


def run(*operands: Tensor, **options: Any) -> Any:
    """Build, check and compute a call with the reference."""
    _, args = attention(*operands, **options)
    ATTENTION.check(args)
    done = ATTENTION.empty(args) if ATTENTION.empty is not None else None
    result = attention_reference(*args) if done is None else done
    specs = ATTENTION.outputs(args)
    for spec, part in zip(specs, result if isinstance(result, tuple) else (result,), strict=True):
        assert tuple(part.shape) == spec.shape
        assert str(part.dtype) == f"torch.{spec.dtype}"
    return result


def operands(
    batch: int = 2, heads: int = 4, groups: int = 2, q_len: int = 5, k_len: int = 7, d: int = 8, dv: int = 6
) -> tuple[Tensor, Tensor, Tensor]:
    """Random float32 q, k, v in BHSD."""
    return (
        torch.randn(batch, heads, q_len, d),
        torch.randn(batch, groups, k_len, d),
        torch.randn(batch, groups, k_len, dv),
    )


@st.composite
def calls(draw: st.DrawFn) -> tuple[tuple[Tensor, Tensor, Tensor], dict[str, Any]]:
    """Random operands and options that fit each other."""
    torch.manual_seed(draw(st.integers(0, 1 << 20)))
    groups, per_group = draw(st.integers(1, 2)), draw(st.integers(1, 3))
    batch, q_len, k_len = draw(st.integers(1, 2)), draw(st.integers(1, 6)), draw(st.integers(1, 6))
    heads = groups * per_group
    qkv = operands(batch, heads, groups, q_len, k_len, draw(st.integers(1, 5)), draw(st.integers(1, 5)))
    options: dict[str, Any] = {"is_causal": draw(st.booleans()), "return_lse": draw(st.booleans())}
    kind = draw(st.sampled_from(["none", "bool", "float"]))
    if kind != "none":
        full = (batch, heads, q_len, k_len)
        shape = tuple(draw(st.sampled_from([1, n])) for n in full)[draw(st.integers(0, 2)) :]
        seen = torch.rand(shape) < draw(st.sampled_from([0.1, 0.5, 0.9]))
        hidden = torch.randn(shape).masked_fill(~seen, -INF)
        options |= {"attn_mask": seen if kind == "bool" else hidden, "combine_mask": True}
    if draw(st.booleans()):
        options["window"] = (draw(st.integers(-1, 4)), draw(st.integers(-1, 4)))
    options["scale"] = draw(st.sampled_from([None, 0.5, -1.0, 0.0]))
    options["softcap"] = draw(st.sampled_from([None, 1.5]))
    if draw(st.booleans()):
        options["alibi_slopes"] = torch.rand(heads) if draw(st.booleans()) else torch.rand(batch, heads)
    if draw(st.booleans()):
        options["sinks"] = torch.randn(heads)
    if draw(st.booleans()):
        table = torch.randn(batch, heads, q_len, k_len)
        options["score_mod"] = lambda s, b, h, i, j: s * (1 + i) + table[b, h, i, j]
    if draw(st.booleans()):
        tiles = torch.rand(batch, heads, q_len, k_len) < draw(st.sampled_from([0.3, 0.95]))
        sizes = (draw(st.sampled_from([1, batch])), draw(st.sampled_from([1, heads])))
        options["block_mask"] = create_block_mask(
            lambda b, h, i, j: tiles[b, h, i, j], *sizes, q_len, k_len, "cpu", BLOCK_SIZE=2
        )
        options["combine_mask"] = True
    return qkv, options


@given(call=calls(), limit=st.sampled_from([1, 30, 1 << 24]), layout=st.sampled_from(["BHSD", "BSHD"]))
def test_reference_equals_the_loop(call: Any, limit: int, layout: str) -> None:
    """Any mix of options, in either layout and any block size, equals the loop over scalars."""
    qkv, options = call
    plain = {k: v for k, v in options.items() if k not in ("return_lse", "combine_mask")}
    out, lse = oracle(*qkv, **plain)
    given_ = [t.transpose(1, 2) for t in qkv] if layout == "BSHD" else list(qkv)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "MAX_SCORES", limit)
        got = run(*given_, **options, layout=layout)
    got_out = got[0] if options["return_lse"] else got
    got_out = got_out.transpose(1, 2) if layout == "BSHD" else got_out
    assert_close(got_out.double(), out, atol=2e-5, rtol=2e-5)
    if options["return_lse"]:
        assert_close(got[1].double(), lse, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_low_precision_is_the_float64_result_rounded(dtype: torch.dtype) -> None:
    """Scores and sums are float32, so a low precision output is off by its own rounding only."""
    q, k, v = (t.to(dtype) for t in operands(d=64, k_len=33))
    out, _ = oracle(q, k, v, is_causal=True)
    got = run(q, k, v, is_causal=True)
    eps = torch.finfo(dtype).eps
    assert_close(got.double(), out, atol=1e-6 if dtype == torch.float32 else eps, rtol=eps)


def test_causal_is_aligned_at_the_last_query_and_key() -> None:
    """Two queries over five keys see four and five of them."""
    q, k, v = operands(q_len=2, k_len=5)
    seen = torch.tensor([[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]], dtype=torch.bool)
    assert_close(run(q, k, v, is_causal=True), run(q, k, v, attn_mask=seen))
    assert not torch.allclose(run(q, k, v, is_causal=True), F.scaled_dot_product_attention(
        q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1), is_causal=True
    ))  # fmt: skip


@pytest.mark.parametrize("value", [0.0, math.nan, INF])
def test_rows_without_a_key_are_zero(value: float) -> None:
    """Hidden rows give exactly 0 and -inf, whatever the hidden keys and values hold."""
    q, k, v = operands(q_len=3, k_len=4)
    k[:, :, 0], v[:, :, 0] = value, value
    mask = torch.ones(3, 4, dtype=torch.bool)
    mask[:, 0] = False
    mask[1] = False
    k[:, :, 0] = 0.0
    out, lse = run(q, k, v, attn_mask=mask, return_lse=True)
    assert torch.equal(out[:, :, 1], torch.zeros_like(out[:, :, 1]))
    assert torch.equal(lse[:, :, 1], torch.full_like(lse[:, :, 1], -INF))
    out, lse = run(q, k[:, :, 1:2], v[:, :, 1:2], is_causal=True, return_lse=True)
    assert torch.equal(out[:, :, :2], torch.zeros_like(out[:, :, :2]))
    assert out[:, :, 2].abs().min() > 0
    assert torch.isneginf(lse[:, :, :2]).all()


def test_nan_at_an_attended_key_propagates() -> None:
    """Queries that see the NaN give NaN, queries before it do not."""
    q, k, v = operands(groups=4, q_len=4, k_len=4)
    k[0, 0, 2, 0] = math.nan
    out = run(q, k, v, is_causal=True)
    assert torch.isnan(out[0, 0, 2:]).all()
    assert not torch.isnan(out[1:]).any()
    assert not torch.isnan(out[0, 1:]).any()


@pytest.mark.parametrize(("batch", "q_len", "k_len"), [(0, 3, 4), (2, 0, 4), (2, 3, 0), (0, 0, 0)])
@pytest.mark.parametrize("layout", ["BHSD", "BSHD"])
def test_nothing_to_attend_gives_zeros(batch: int, q_len: int, k_len: int, layout: str) -> None:
    """An empty batch or sequence gives an empty or zero output and an LSE of -inf, without a kernel."""
    q, k, v = operands(batch, q_len=q_len, k_len=k_len)
    if layout == "BSHD":
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    _, args = attention(q, k, v, layout=layout, return_lse=True)
    ATTENTION.check(args)
    assert ATTENTION.empty is not None
    done = ATTENTION.empty(args)
    assert done is not None
    out, lse = run(q, k, v, layout=layout, return_lse=True)
    assert not out.any() and torch.isneginf(lse).all()
    assert lse.dtype == torch.float32
    assert ATTENTION.empty(attention(*operands())[1]) is None


def test_dropout_draws_from_the_default_generator() -> None:
    """One seed gives one result; kept weights are scaled up; the mean stays near the undropped output."""
    q, k, v = operands(batch=1, q_len=64, k_len=64)
    torch.manual_seed(7)
    first = run(q, k, v, dropout_p=0.5)
    torch.manual_seed(7)
    assert torch.equal(first, run(q, k, v, dropout_p=0.5))
    assert not torch.equal(first, run(q, k, v, dropout_p=0.5))
    mean = torch.stack([run(q, k, v, dropout_p=0.5) for _ in range(200)]).mean(0)
    assert (mean - run(q, k, v)).abs().mean() < 0.02


def test_output_of_bshd_is_dense() -> None:
    """A caller may view (B, S, H, D) as (B, S, H * D)."""
    q, k, v = (t.transpose(1, 2) for t in operands())
    assert run(q, k, v, layout="BSHD").is_contiguous()


def torch_samples(dtype: torch.dtype) -> list[Any]:
    """The samples that torch tests its own attention with."""
    from torch.testing._internal.common_methods_invocations import op_db

    info: Any = next(op for op in op_db if op.name == "nn.functional.scaled_dot_product_attention")
    samples: list[Any] = list(info.sample_inputs("cpu", dtype))
    return samples


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_torch_samples(dtype: torch.dtype) -> None:
    """Torch's sample inputs, with heads and batch made explicit, give torch's results."""
    samples = torch_samples(dtype)
    assert len(samples) >= 20
    for sample in samples:
        q: Tensor = sample.input
        k: Tensor = sample.args[0]
        v: Tensor = sample.args[1]
        options = dict(sample.kwargs)
        if q.dim() != k.dim() or q.dim() != 4:
            with pytest.raises(ValueError, match="q needs 4 dimensions, got 3"):
                run(q, k, v, **options)
            batch = k.shape[0]
            q, k, v = (t.unsqueeze(1) if k.dim() == 3 else t.expand(batch, *t.shape[-3:]) for t in (q, k, v))
        causal = options.pop("is_causal", False)
        if options.get("dropout_p"):
            assert run(q, k, v, **options, is_causal=causal).shape == q.shape
            options["dropout_p"] = 0.0
        theirs = dict(options)
        if causal:
            rows, columns = q.shape[2], k.shape[2]
            theirs["attn_mask"] = torch.ones(rows, columns, dtype=torch.bool).tril(columns - rows)
        expected = F.scaled_dot_product_attention(q, k, v, **theirs)
        atol = 2e-2 if dtype == torch.bfloat16 else 1e-5
        assert_close(run(q, k, v, **options, is_causal=causal), expected, atol=atol, rtol=atol)


def test_torch_defines_no_error_inputs() -> None:
    """Torch lists no error inputs for attention; when it does, they belong into these tests."""
    from torch.testing._internal.common_methods_invocations import op_db

    (info,) = [op for op in op_db if op.name == "nn.functional.scaled_dot_product_attention"]
    assert info.error_inputs_func is None


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"is_causal": True, "window": (2, 0)},
        {"softcap": 2.0, "scale": 0.7},
        {"attn_mask": torch.tensor([[True, False, True], [False, False, False]])},
    ],
)
def test_gradient(options: dict[str, Any]) -> None:
    """The reference's gradient is the numeric one, hidden rows included."""
    q, k, v = (t.double().requires_grad_() for t in operands(1, 2, 1, 2, 3, 3, 2))
    assert torch.autograd.gradcheck(lambda *t: attention_reference(*attention(*t, **options)[1]), (q, k, v))


def test_gradient_of_the_lse() -> None:
    """The LSE's gradient is the softmax's, through the keys."""
    q, k, v = (t.double().requires_grad_() for t in operands(1, 2, 2, 3, 4))
    _, lse = attention_reference(*attention(q, k, v, scale=1.0, return_lse=True)[1])
    (got,) = torch.autograd.grad(lse.sum(), q)
    weights = torch.softmax(q @ k.transpose(-1, -2), -1)
    assert_close(got, weights @ k, atol=1e-6, rtol=1e-6)


def test_gradient_of_a_mask_and_of_slopes() -> None:
    """An additive mask and slopes are differentiable operands; -inf stays without gradient."""
    q, k, v = (t.double() for t in operands(1, 2, 1, 2, 3, 3, 2))
    mask = torch.randn(2, 3, dtype=torch.float64).requires_grad_()
    slopes = torch.rand(2, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(
        lambda m, s: attention_reference(*attention(q, k, v, attn_mask=m, alibi_slopes=s)[1]), (mask, slopes)
    )
    q.requires_grad_()
    hidden = torch.full((2, 3), -INF, dtype=torch.float64)
    run(q, k, v, attn_mask=hidden).sum().backward()
    assert q.grad is not None and not q.grad.any()


def test_long_contexts_need_no_full_score_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    """No block of scores is larger than the limit, and causal blocks leave out the keys they cannot see."""
    assert module.MAX_SCORES * 4 <= 64 << 20, "64 MiB of float32"
    sizes: list[int] = []
    inner = module._scores

    def watched(*args: Any) -> Tensor:
        scores = inner(*args)
        sizes.append(scores.numel())
        return scores

    monkeypatch.setattr(module, "_scores", watched)
    monkeypatch.setattr(module, "MAX_SCORES", 1 << 14)
    q, k, v = operands(1, 1, 1, 1024, 1024, 4, 4)
    got = run(q, k, v, is_causal=True)
    assert max(sizes) <= 1 << 14
    assert sum(sizes) < 0.55 * 1024 * 1024
    assert_close(got, F.scaled_dot_product_attention(q, k, v, is_causal=True), atol=1e-5, rtol=1e-5)


@given(q_len=st.integers(1, 9), k_len=st.integers(1, 9))
def test_work_counts_the_pairs_that_causal_leaves(q_len: int, k_len: int) -> None:
    """Flops follow the visible (query, key) pairs."""
    q, k, v = operands(q_len=q_len, k_len=k_len)
    pairs = int(torch.ones(q_len, k_len).tril(k_len - q_len).sum())
    request = ATTENTION.check(attention(q, k, v, is_causal=True)[1])
    assert visible_pairs(request) == pairs
    assert ATTENTION.work(request).flops == 2 * 2 * 4 * (8 + 6) * pairs
    full = ATTENTION.work(ATTENTION.check(attention(q, k, v)[1]))
    assert full.bytes == 4 * sum(t.numel() for t in (q, k, v)) + 4 * 2 * 4 * q_len * 6


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_modifiers_mean_what_torchs_flex_attention_means() -> None:
    """A score modifier and a block mask give what torch gives, eager, in float64."""
    q, k, v = (t.double() for t in operands(q_len=6, k_len=6))
    bias = torch.randn(4, 6, 6).double()

    def mod(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return torch.where(i - j > 2, s * 2, s) + bias[h, i, j]

    blocks = create_block_mask(
        lambda b, h, i, j: (i >= j) & (i - j < 3 + b), 2, None, 6, 6, "cpu", BLOCK_SIZE=2
    )
    theirs = flex_attention(q, k, v, score_mod=mod, block_mask=blocks, enable_gqa=True)
    assert_close(run(q, k, v, score_mod=mod, block_mask=blocks), theirs)


def test_gradients_reach_sinks_and_what_a_modifier_holds() -> None:
    """Sinks are learnt, and so are tables that a score modifier reads."""
    q, k, v = (t.double().requires_grad_() for t in operands(q_len=3, k_len=4, d=3, dv=2))
    sinks, bias = torch.randn(4).double().requires_grad_(), torch.randn(4, 3, 4).double().requires_grad_()

    def call(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, bias: Tensor) -> Any:
        mod = lambda s, b, h, i, j: s + bias[h, i, j]  # noqa: E731
        return attention_reference(q, k, v, sinks=sinks, score_mod=mod, return_lse=False)

    assert torch.autograd.gradcheck(call, (q, k, v, sinks, bias))


def test_a_sink_takes_its_share() -> None:
    """A sink of -inf is none, a great one takes everything; the denominator counts it."""
    q, k, v = operands()
    plain, lse = run(q, k, v, return_lse=True)
    out, same = run(q, k, v, return_lse=True, sinks=torch.full((4,), -INF))
    assert_close(out, plain)
    assert_close(same, lse)
    out, great = run(q, k, v, return_lse=True, sinks=torch.full((4,), 80.0))
    assert out.abs().max() < 1e-20
    assert_close(great, torch.full_like(great, 80.0))
    hidden, alone = run(
        q, k, v, return_lse=True, sinks=torch.ones(4), attn_mask=torch.zeros(5, 7, dtype=torch.bool)
    )
    assert not hidden.any() and (alone == 1).all()


@pytest.mark.parametrize(
    ("wrong", "kind", "words"),
    [
        ({"sinks": torch.randn(3)}, ValueError, r"sinks needs shape \(4,\)"),
        ({"sinks": torch.ones(4, dtype=torch.long)}, TypeError, "sinks needs a floating"),
        ({"sinks": [1.0] * 4}, TypeError, "sinks needs a torch.Tensor"),
        ({"score_mod": 3}, TypeError, "score_mod needs a callable"),
        ({"block_mask": torch.ones(5, 7)}, TypeError, "block_mask needs a torch.nn.attention"),
        ({"block_mask": (5, 5)}, ValueError, "block_mask needs .B, Hq, Sq, Sk."),
        ({"block_mask": (5, 7), "is_causal": True}, ValueError, "combine_mask=True"),
    ],
)  # fmt: skip
def test_wrong_modifiers_are_named(wrong: dict[str, Any], kind: Any, words: str) -> None:
    """Each by its argument, what it needs and what it got."""
    if isinstance(wrong.get("block_mask"), tuple):
        queries, keys = wrong["block_mask"]
        wrong = {
            **wrong,
            "block_mask": create_block_mask(lambda b, h, i, j: i >= j, None, None, queries, keys, "cpu"),
        }
    with pytest.raises(kind, match=words):
        run(*operands(), **wrong)
