"""Bad input of attention, how a call is described, how a layout is inferred, what a signature holds."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from layerzero.backends import load_builtin
from layerzero.ops import checks
from layerzero.ops.attention.attention import ATTENTION, attention
from layerzero.ops.attention.checks import infer_layout
from layerzero.spec.call_spec import CallSpec


def call(**changes: Any) -> tuple[Any, ...]:
    """The arguments of a valid call, (2, 4, 5, 8) over (2, 2, 7, 8), with some changed."""
    q, k, v = torch.zeros(2, 4, 5, 8), torch.zeros(2, 2, 7, 8), torch.zeros(2, 2, 7, 6)
    _, args = attention(changes.pop("q", q), changes.pop("k", k), changes.pop("v", v), **changes)
    return args


def describe(**changes: Any) -> CallSpec:
    """The request of that call."""
    return ATTENTION.check(call(**changes))


BAD_VALUES: list[tuple[dict[str, Any], str]] = [
    ({"q": torch.zeros(4, 5, 8)}, r"q needs 4 dimensions, got 3"),
    ({"k": torch.zeros(7, 8)}, r"k needs 4 dimensions, got 2"),
    ({"v": torch.zeros(1, 2, 2, 7, 8)}, r"v needs 4 dimensions, got 5"),
    ({"q": torch.zeros(2, 3, 5, 8)}, r"k needs a number of heads that divides q's 3, got 2"),
    ({"k": torch.zeros(2, 0, 7, 8), "v": torch.zeros(2, 0, 7, 8)}, r"k needs a number of heads .* got 0"),
    ({"q": torch.zeros(2, 0, 5, 8)}, r"k needs a number of heads .* q's 0"),
    ({"v": torch.zeros(2, 4, 7, 8)}, r"v needs heads 2 like k, got 4"),
    ({"v": torch.zeros(2, 2, 6, 8)}, r"v needs tokens 7 like k, got 6"),
    ({"k": torch.zeros(3, 2, 7, 8)}, r"k needs batch 2 like q, got 3"),
    ({"v": torch.zeros(1, 2, 7, 8)}, r"v needs batch 2 like q, got 1"),
    ({"k": torch.zeros(2, 2, 7, 16)}, r"k needs head size 8 like q, got 16"),
    ({"q": torch.zeros(2, 4, 5, 0), "k": torch.zeros(2, 2, 7, 0)}, r"q needs a head size of at least 1"),
    ({"v": torch.zeros(2, 2, 7, 0)}, r"v needs a head size of at least 1"),
    ({"k": torch.zeros(2, 2, 7, 8, device="meta")}, r"k needs to be on cpu like q, got meta"),
    ({"v": torch.zeros(2, 2, 7, 8, device="meta")}, r"v needs to be on cpu like q, got meta"),
    ({"attn_mask": torch.ones(5, 6, dtype=torch.bool)}, r"attn_mask needs .* broadcast"),
    ({"attn_mask": torch.ones(2, 5, 7)}, r"attn_mask needs .* \(2, 4, 5, 7\), got shape \(2, 5, 7\)"),
    ({"attn_mask": torch.ones(7)}, r"attn_mask needs 2 to 4 axes"),
    ({"attn_mask": torch.ones(1, 1, 1, 5, 7)}, r"attn_mask needs 2 to 4 axes"),
    ({"attn_mask": torch.ones(5, 7, device="meta")}, r"attn_mask needs to be on cpu"),
    ({"attn_mask": torch.ones(5, 7), "is_causal": True}, r"attn_mask with is_causal=True needs combine_mask"),
    ({"dropout_p": 1.0}, r"dropout_p needs a number in \[0, 1\), got 1"),
    ({"dropout_p": -0.1}, r"dropout_p needs a number in \[0, 1\)"),
    ({"dropout_p": math.nan}, r"dropout_p needs a number in \[0, 1\)"),
    ({"scale": math.nan}, r"scale needs a finite number .* got nan"),
    ({"scale": math.inf}, r"scale needs a finite number .* got inf"),
    ({"window": (-2, 0)}, r"window needs an int >= -1, got -2"),
    ({"softcap": 0.0}, r"softcap needs a number > 0, got 0"),
    ({"softcap": -1.0}, r"softcap needs a number > 0, got -1"),
    ({"softcap": math.inf}, r"softcap needs a number > 0, got inf"),
    ({"alibi_slopes": torch.zeros(2)}, r"alibi_slopes needs shape \(4,\) or \(2, 4\), got \(2,\)"),
    ({"alibi_slopes": torch.zeros(4, device="meta")}, r"alibi_slopes needs to be on cpu"),
    ({"layout": "SBHD"}, r"layout needs one of BHSD, BSHD, got 'SBHD'"),
    ({"layout": "bhsd"}, r"layout needs one of"),
    ({"q": torch.eye(8).expand(2, 4, 8, 8).to_sparse()}, r"q needs a strided tensor"),
]
BAD_TYPES: list[tuple[dict[str, Any], str]] = [
    ({"q": None}, r"q needs a torch.Tensor, got NoneType"),
    ({"k": [1.0]}, r"k needs a torch.Tensor, got list"),
    ({"v": np.zeros((2, 2, 7, 8))}, r"v needs a torch.Tensor, got ndarray"),
    ({"q": torch.zeros(2, 4, 5, 8, dtype=torch.int32)}, r"q needs a floating point dtype, got int32"),
    ({"q": torch.zeros(2, 4, 5, 8, dtype=torch.complex64)}, r"q needs a floating point dtype, got complex64"),
    ({"attn_mask": torch.ones(5, 7, dtype=torch.int64)}, r"attn_mask needs a bool or floating .* got int64"),
    ({"attn_mask": "causal"}, r"attn_mask needs a torch.Tensor, got str"),
    ({"alibi_slopes": 0.5}, r"alibi_slopes needs a torch.Tensor, got float"),
    ({"alibi_slopes": torch.ones(4, dtype=torch.int64)}, r"alibi_slopes needs a floating point dtype"),
    ({"dropout_p": "0.1"}, r"dropout_p needs a number, got str"),
    ({"scale": "1.0"}, r"scale needs a number, got str"),
    ({"scale": True}, r"scale needs a number, got bool"),
    ({"softcap": "30"}, r"softcap needs a number, got str"),
    ({"window": 5}, r"window needs a pair"),
    ({"window": (1, 2, 3)}, r"window needs a pair"),
    ({"window": (1.0, 2)}, r"window needs an int, got float"),
    ({"window": (True, 2)}, r"window needs an int, got bool"),
    ({"is_causal": 1}, r"is_causal needs a bool, got int"),
    ({"return_lse": "yes"}, r"return_lse needs a bool, got str"),
    ({"combine_mask": None}, r"combine_mask needs a bool"),
    ({"rows_nonempty": 0}, r"rows_nonempty needs a bool"),
    ({"layout": 3}, r"layout needs one of BHSD, BSHD, got int"),
]


@pytest.mark.parametrize(("changes", "message"), BAD_VALUES)
def test_a_bad_value_is_named(changes: dict[str, Any], message: str) -> None:
    """A ValueError says which argument, what it needs, what it got."""
    with pytest.raises(ValueError, match=message):
        describe(**changes)


@pytest.mark.parametrize(("changes", "message"), BAD_TYPES)
def test_a_bad_type_is_named(changes: dict[str, Any], message: str) -> None:
    """A TypeError says which argument, what it needs, what it got."""
    with pytest.raises(TypeError, match=message):
        describe(**changes)


def test_checks_change_nothing() -> None:
    """Operands keep values, versions and layout through a check that fails and one that does not."""
    q = torch.randn(2, 4, 5, 8)
    before, version = q.clone(), q._version
    with pytest.raises(ValueError, match="window"):
        describe(q=q, window=(-3, 0))
    describe(q=q)
    assert torch.equal(q, before) and q._version == version


def test_dims_and_flags_are_described() -> None:
    """Sizes by axis, in either layout; contiguity means dense in the given layout."""
    request = describe()
    assert request.dims == {"B": 2, "Hq": 4, "Hk": 2, "G": 2, "Sq": 5, "Sk": 7, "D": 8, "Dv": 6}
    assert request.features == {"gqa"}
    assert (request.platform, request.layout, request.contiguous) == ("cpu", "BHSD", True)
    turned = [torch.zeros(s).transpose(1, 2) for s in ((2, 4, 5, 8), (2, 2, 7, 8), (2, 2, 7, 6))]
    other = describe(q=turned[0], k=turned[1], v=turned[2], layout="BSHD")
    assert other.dims == request.dims
    assert (other.layout, other.contiguous, other.last_stride1) == ("BSHD", False, True)
    strided = describe(q=torch.zeros(2, 4, 5, 16)[..., ::2])
    assert not strided.last_stride1 and not strided.contiguous
    shifted = describe(q=torch.zeros(2 * 4 * 5 * 8 + 1)[1:].view(2, 4, 5, 8))
    assert shifted.alignment == 4


def test_mixed_dtypes_are_described() -> None:
    """Operands of several float dtypes pass the check; the request lists them for the selector."""
    request = describe(k=torch.zeros(2, 2, 7, 8, dtype=torch.bfloat16))
    assert request.dtype == "float32"
    assert request.dtypes == ("float32", "bfloat16", "float32")


MASK = torch.ones(5, 7, dtype=torch.bool)


@pytest.mark.parametrize(
    ("changes", "features"),
    [
        ({"is_causal": True}, {"causal"}),
        ({"attn_mask": MASK}, {"mask_bool", "empty_rows"}),
        ({"attn_mask": MASK.float()}, {"mask_float", "empty_rows"}),
        ({"attn_mask": MASK, "rows_nonempty": True}, {"mask_bool"}),
        (
            {"attn_mask": MASK, "is_causal": True, "combine_mask": True},
            {"mask_bool", "causal", "mask_and_causal", "empty_rows"},
        ),
        ({"scale": 0.5}, {"scale"}),
        ({"scale": 8**-0.5}, set()),
        ({"scale": 0.0}, {"scale", "scale_not_positive"}),
        ({"scale": -0.5}, {"scale", "scale_not_positive"}),
        ({"dropout_p": 0.1}, {"dropout"}),
        ({"window": (3, 0)}, {"window"}),
        ({"window": [3, 0]}, {"window"}),
        ({"window": (-1, -1)}, set()),
        ({"softcap": 30.0}, {"softcap"}),
        ({"alibi_slopes": torch.ones(4)}, {"alibi"}),
        ({"alibi_slopes": torch.ones(2, 4)}, {"alibi"}),
        ({"return_lse": True}, {"lse"}),
        ({"q": torch.zeros(2, 4, 9, 8), "is_causal": True}, {"causal", "empty_rows"}),
        ({"q": torch.zeros(2, 4, 9, 8), "is_causal": True, "rows_nonempty": True}, {"causal", "empty_rows"}),
        ({"q": torch.zeros(2, 4, 9, 8)}, set()),
        ({"q": torch.zeros(2, 4, 9, 8), "window": (2, 1)}, {"window", "empty_rows"}),
        ({"q": torch.zeros(2, 4, 9, 8), "window": (2, 2)}, {"window"}),
        ({"q": torch.zeros(2, 4, 9, 8), "window": (2, -1)}, {"window"}),
    ],
)
def test_features(changes: dict[str, Any], features: set[str]) -> None:
    """A call asks for exactly the features it uses; certain empty rows cannot be asserted away."""
    assert describe(**changes).features == features | {"gqa"}


def test_mha_is_not_gqa() -> None:
    """As many key heads as query heads need no grouping; one key head does."""
    kv = torch.zeros(2, 4, 7, 8)
    assert describe(k=kv, v=kv).features == frozenset()
    one = torch.zeros(2, 1, 7, 8)
    assert describe(k=one, v=one).dims["G"] == 4


@pytest.mark.parametrize("shape", [(5, 7), (1, 7), (4, 5, 7), (1, 1, 7), (2, 1, 5, 7), (2, 4, 5, 1)])
def test_masks_broadcast_as_in_torch(shape: tuple[int, ...]) -> None:
    """Axes align at the right; rank 3 is (Hq, Sq, Sk)."""
    assert "mask_bool" in describe(attn_mask=torch.ones(shape, dtype=torch.bool)).features


def bhsd(heads: int, tokens: int) -> Tensor:
    """Heads by tokens, dense."""
    return torch.zeros(2, heads, tokens, 8)


def test_layout_from_shapes() -> None:
    """Where the shapes fit one reading only, that one is it, decode and long contexts included."""
    assert infer_layout(bhsd(32, 1), bhsd(8, 77), bhsd(8, 77)) == "BHSD"
    q, kv = bhsd(32, 1).transpose(1, 2), bhsd(8, 77).transpose(1, 2)
    assert infer_layout(q.contiguous(), kv.contiguous(), kv.contiguous()) == "BSHD"


def test_layout_from_strides() -> None:
    """Projections turned to heads by tokens are told by their strides."""
    x = torch.zeros(2, 7, 4, 8).transpose(1, 2)
    assert infer_layout(x, x, x) == "BHSD"
    _, args = attention(x, x, x, layout=None)
    assert args[10] == "BHSD"


@pytest.mark.parametrize("shape", [(2, 4, 7, 8), (2, 4, 4, 8), (1, 32, 1, 8)])
def test_an_ambiguous_layout_raises(shape: tuple[int, ...]) -> None:
    """Dense operands of one shape fit both readings: the error names both."""
    x = torch.zeros(shape)
    _, first, second, _ = shape
    both = rf"BHSD with {first} heads and {second} tokens or BSHD with {first} tokens and {second} heads"
    with pytest.raises(ValueError, match=both):
        attention(x, x, x, layout=None)


def test_a_layout_that_fits_nothing_is_checked_as_the_default() -> None:
    """Operands that fit no reading get the error of the default layout."""
    with pytest.raises(ValueError, match="v needs heads"):
        describe(q=bhsd(3, 5), k=bhsd(2, 7), v=bhsd(4, 9), layout=None)


def test_signature_is_stable() -> None:
    """Two builds of one call give equal signatures; other values of the same kind change nothing."""
    options: dict[str, Any] = {"attn_mask": MASK, "window": (1, 2), "scale": 0.5}
    q, k, v = call()[:3]
    first, _ = attention(q, k, v, **options)
    options["attn_mask"] = MASK.clone()
    again, _ = attention(q + 1, k + 1, v + 1, **options)
    assert first == again
    assert hash(first) == hash(again)
    assert first[0] == "attention"


CHANGES: list[dict[str, Any]] = [
    {"q": torch.zeros(2, 4, 6, 8)},
    {"q": torch.zeros(2, 5, 4, 8).transpose(1, 2)},
    {"q": torch.zeros(2, 4, 5, 8, dtype=torch.float16)},
    {"q": torch.zeros(2, 4, 5, 8, device="meta")},
    {"q": torch.zeros(2, 4, 5, 8, requires_grad=True)},
    {"k": torch.zeros(2, 2, 7, 8, dtype=torch.float16)},
    {"k": torch.zeros(2, 7, 2, 8).transpose(1, 2)},
    {"k": torch.zeros(2, 2, 7, 8, device="meta")},
    {"k": torch.zeros(2, 2, 7, 8, requires_grad=True)},
    {"v": torch.zeros(2, 2, 7, 4)},
    {"v": torch.zeros(2, 2, 7, 6, dtype=torch.float16)},
    {"v": torch.zeros(2, 2, 7, 6, requires_grad=True)},
    {"v": torch.zeros(2, 2, 7, 6, device="meta")},
    {"attn_mask": MASK},
    {"attn_mask": MASK.float()},
    {"attn_mask": MASK[:1]},
    {"attn_mask": MASK.float().requires_grad_()},
    {"is_causal": True},
    {"scale": 0.25},
    {"dropout_p": 0.5},
    {"window": (1, 1)},
    {"window": (1, 2)},
    {"softcap": 5.0},
    {"alibi_slopes": torch.ones(4)},
    {"alibi_slopes": torch.ones(2, 4)},
    {"layout": "BSHD"},
    {"return_lse": True},
    {"combine_mask": True},
    {"rows_nonempty": True},
]


def test_signature_changes_with_every_property() -> None:
    """No two calls that differ in any property share a signature."""
    q, k, v = call()[:3]
    build: Any = attention
    signatures = [attention(q, k, v)[0]]
    for changes in CHANGES:
        changed: dict[str, Any] = {"q": q, "k": k, "v": v} | changes
        operands = [changed.pop(name) for name in "qkv"]
        signatures.append(build(*operands, **changed)[0])
    assert len(set(signatures)) == len(CHANGES) + 1


def test_rows_between_two_loads_count_as_their_addresses_do() -> None:
    """A tensor with gaps is as aligned as its rows; a dense one, whose rows kernels pad, as its start."""
    wide = torch.zeros(2, 4, 8, 80, dtype=torch.bfloat16)
    assert checks.alignment_of([wide[..., :64]]) == 32
    assert checks.alignment_of([torch.zeros(4, 65, dtype=torch.bfloat16)[:, :64]]) == 2
    assert checks.alignment_of([torch.zeros(4, 65, dtype=torch.bfloat16)]) == 64
    assert checks.alignment_of([wide.transpose(1, 2)]) == 32
    assert checks.alignment_of([wide[:1, :1, :1, 1:65]]) == 2


@pytest.mark.parametrize("variant", ["sdpa", "sdpa_flash", "sdpa_cudnn", "sdpa_efficient"])
def test_torchs_attention_on_a_gpu_reads_sixteen_bytes_at_once(variant: str) -> None:
    """cuDNN answers misaligned rows wrongly without a word, FlashAttention ends the use of the device."""
    kernel = next(k for k in load_builtin() if k.id == f"torch.attention.{variant}")
    assert kernel.capability.alignment == 16
