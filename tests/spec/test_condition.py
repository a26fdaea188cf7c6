"""Conditions: parsing with near matches, and what holds for a request."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from layerzero.spec.call_spec import CallSpec
from layerzero.spec.condition import Condition, Limit, parse_conditions, parse_limit
from layerzero.spec.errors import PolicyValidationError
from layerzero.spec.reasons import Reason
from tests.profiles import many_examples

REQUEST = CallSpec(
    op="attention",
    dtype="bfloat16",
    device="cuda:0",
    platform="cuda",
    layout="BHSD",
    dims={"B": 2, "Sq": 1024, "D": 64},
    features=frozenset({"causal"}),
    modes=frozenset({"grad"}),
    contiguous=False,
    alignment=16,
)


@pytest.mark.parametrize(
    ("text", "holds"),
    [
        ("Sq > 1023", True),
        ("Sq > 1024", False),
        ("Sq >= 1024", True),
        ("Sq < 1025", True),
        ("Sq < 1024", False),
        ("Sq <= 1024", True),
        ("Sq<=1023", False),
        ("head_dim == 64", True),
        ("head_dim != 64", False),
        ("batch in [1, 2]", True),
        ("batch not in [1, 2]", False),
        ("D in [128]", False),
        ("alignment >= 32", False),
        ("dtype == bfloat16", True),
        ("dtype != bfloat16", False),
        ("dtype in [float16, bfloat16]", True),
        ("dtype not in [float16]", True),
        ("device like cuda*", True),
        ("device like cpu*", False),
        ("layout == 'BHSD'", True),
        ("causal", True),
        ("not causal", False),
        ("grad", True),
        ("not capture", True),
        ("contiguous", False),
        ("last_stride1", True),
        ("D % 32 == 0", True),
        ("D % 48 == 0", False),
        ("Sq > D", True),
        ("head_dim == B", False),
        ("B * Sq <= 2048", True),
        ("batch * seq_q < 2048", False),
        ("Sq > 512 and causal", True),
        ("Sq > 512 and not causal", False),
    ],
)
def test_conditions_hold_or_not(text: str, holds: bool) -> None:
    """Each operator on sizes, words, flags and modes gives the verdict it reads as."""
    assert all(c.holds(REQUEST) for c in parse_conditions(text)) is holds


@pytest.mark.parametrize(
    "text", ["Sk > 0", "Sk != 7", "Sk not in [1]", "page_size < 100", "Sq != Sk", "Sk % 2 == 0"]
)
def test_a_size_the_request_lacks_satisfies_nothing(text: str) -> None:
    """A rule about keys does not speak about an op without keys, negated or not."""
    assert not parse_conditions(text)[0].holds(REQUEST)


@pytest.mark.parametrize(
    ("text", "needs"),
    [
        ("head_dmi == 64", "did you mean 'head_dim'"),
        ("sq > 1", "did you mean 'Sq'"),
        ("casual", "did you mean 'causal'"),
        ("dtype", "comparison for dtype"),
        ("causal == 1", "`causal` or `not causal`"),
        ("Sq >> 1", "field > number"),
        ("Sq > many", "whole number"),
        ("Sq > 1.5", "whole number"),
        ("Sq like 1*", "word field"),
        ("dtype > float16", "== or !="),
        ("Sq in []", "at least one value"),
        ("B * dtype > 1", "sizes in a product"),
        ("Sq % many == 0", "whole number"),
        ("", "field > number"),
        ("Sq > 1 or B > 1", "field > number"),
        ("__class__ == x", "field > number"),
        ("Sq > " + "9" * 400, "whole number"),
    ],
)
def test_what_does_not_parse_says_what_would(text: str, needs: str) -> None:
    """Unknown fields, operators and values are refused in words that help."""
    with pytest.raises(PolicyValidationError, match=needs) as caught:
        parse_conditions(text)
    assert str(caught.value).startswith("when ") and len(str(caught.value)) < 900


def test_several_texts_all_count() -> None:
    """A list of texts is one conjunction, and the axis of a size is told."""
    conditions = parse_conditions(["Sq > 1 and D == 64", "causal"])
    assert [c.axes for c in conditions] == [("Sq",), ("D",), ()]
    assert conditions[2] == Condition("causal", "is")


_sizes = st.tuples(
    st.sampled_from(["Sq", "head_dim", "B", "rows"]), st.sampled_from(["==", "!=", ">", "<=", "<", ">="])
)


@many_examples
@given(_sizes, st.integers(0, 10**6))
def test_text_of_a_condition_parses_back(size: tuple[str, str], number: int) -> None:
    """`str` of a condition is a condition text with the same meaning, so digests and reports agree."""
    (condition,) = parse_conditions(f"{size[0]} {size[1]} {number}")
    assert parse_conditions(str(condition)) == (condition,)


@many_examples
@given(st.text(max_size=60))
def test_any_text_parses_or_is_refused(text: str) -> None:
    """No text raises anything but the policy's own error."""
    try:
        assert all(isinstance(c.holds(REQUEST), bool) for c in parse_conditions(text))
    except PolicyValidationError as error:
        assert str(error).startswith("when ")


@pytest.mark.parametrize(
    ("text", "inside", "beyond", "needs", "got"),
    [
        ("D <= 64", 64, 65, "<= 64", "65"),
        ("D >= 64", 64, 63, ">= 64", "63"),
        ("D % 8 == 0", 64, 60, "a multiple of 8", "60"),
        ("D in [32, 64]", 64, 48, "one of 32, 64", "48"),
        ("D not in [32, 48]", 64, 48, "none of 32, 48", "48"),
        ("D == Dv", 64, 32, "equal to Dv", "32 and 64"),
        ("B * D <= 128", 64, 65, "<= 128", "130"),
    ],
)
def test_a_limit_tells_what_it_needs_and_what_it_got(
    text: str, inside: int, beyond: int, needs: str, got: str
) -> None:
    """Each kind of limit accepts at its bound, refuses behind it, and says both in a rejection's words."""
    limit, sizes = parse_limit(f"{text} when causal else HEAD_DIM_INVALID"), {"B": 2, "Dv": 64}
    assert limit.holds(sizes | {"D": inside}) and not limit.holds(sizes | {"D": beyond})
    assert (limit.needs(), limit.got(sizes | {"D": beyond})) == (needs, got)
    assert (limit.when, limit.reason) == ("causal", Reason.HEAD_DIM_INVALID)
    assert str(limit) == f"{text} when causal else HEAD_DIM_INVALID"
    assert parse_limit(text) == Limit(limit.condition)


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("G <= 8", Reason.GROUP_SIZE_UNSUPPORTED),
        ("P % 256 == 0", Reason.PAGE_SIZE_UNSUPPORTED),
        ("N >= 17", Reason.ROWS_UNSUPPORTED),
        ("Hk in [8]", Reason.HEADS_UNSUPPORTED),
        ("D >= 8", Reason.HEAD_DIM_TOO_SMALL),
        ("D in [128]", Reason.HEAD_DIM_INVALID),
        ("Sk <= 4096", Reason.SEQ_TOO_LONG),
        ("B >= 2", Reason.BATCH_TOO_SMALL),
        ("C % 64 == 0", Reason.WIDTH_ALIGNMENT),
        ("C % 64 == 0 else HEAD_DIM_INVALID", Reason.HEAD_DIM_INVALID),
        ("Sq in [128]", Reason.SIZE_UNSUPPORTED),
        ("S in [128]", Reason.SIZE_UNSUPPORTED),
        ("B * Hq <= 9", Reason.SIZE_UNSUPPORTED),
    ],
)
def test_a_limit_that_names_no_reason_gives_that_of_its_axis(text: str, code: Reason) -> None:
    """A stated one comes before it; a product, or what no code speaks of, gives the general one."""
    limit = parse_limit(text)
    assert limit.code is code and str(limit) == text


def test_a_call_without_the_size_is_within_a_limit() -> None:
    """A limit on keys does not refuse an op without keys; a product counts what is there."""
    assert all(parse_limit(text).holds({"N": 4}) for text in ("Sk <= 1", "D == Dv", "Sk in [1]"))
    assert not parse_limit("N * Sk <= 3").holds({"N": 4})


@pytest.mark.parametrize(
    ("text", "needs"),
    [
        ("", "a condition"),
        ("causal", "a condition on sizes"),
        ("dtype == float32", "a condition on sizes"),
        ("D <= 0", "a value of at least 1"),
        ("D in [0, 64]", "a value of at least 1"),
        ("D <= 64 when casual", "a feature or a mode after when"),
        ("D <= 64 else TOO_LARGE", "a reason after else"),
    ],
)
def test_what_is_no_limit_says_what_one_is(text: str, needs: str) -> None:
    """Whatever bounds no size is refused, in words that name limits."""
    with pytest.raises(PolicyValidationError, match=f"^limits needs {needs}"):
        parse_limit(text)
