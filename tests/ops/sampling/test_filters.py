"""What `sample` filters by is in its request, so that a kernel without a filter is refused, not wrong."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from layerzero.backends import load_builtin
from layerzero.ops.sampling.sampling import SAMPLE
from layerzero.selection.modes import mode_bits
from layerzero.selection.plan import signature_of
from layerzero.spec.kernel import Kernel, rejections
from layerzero.spec.reasons import Reason
from tests.backends.cases import HERE, why_not_here
from tests.kernels import device, kernel

LOGITS = torch.randn(16, 50, generator=torch.Generator().manual_seed(0))
BOTH = {"top_k", "top_p", "top_k_and_top_p"}
EACH = torch.full((16,), 5)
ASKED: list[tuple[dict[str, Any], set[str]]] = [
    ({}, set()),
    ({"top_k": 5}, {"top_k"}),
    ({"top_p": 0.7}, {"top_p"}),
    ({"top_k": 5, "top_p": 0.7}, BOTH),
    ({"top_k": EACH}, {"top_k"}),
    ({"top_k": EACH, "top_p": torch.full((16,), 0.7), "seed": EACH}, BOTH | {"seed_per_row"}),
    ({"temperature": 0.5, "seed": 3}, set()),
]


def arguments(options: dict[str, Any]) -> tuple[Any, ...]:
    """The argument tuple of a call with a seed."""
    return SAMPLE.build(LOGITS, **({"seed": 7} | options))[1]


@pytest.mark.parametrize(("options", "features"), ASKED)
def test_the_request_names_the_filters(options: dict[str, Any], features: set[str]) -> None:
    """Each filter that a call has, and both together; a tensor may hold any number, so it is a filter."""
    assert SAMPLE.check(arguments(options)).features == features


SAMPLERS = [k for k in load_builtin(op="sample") if not why_not_here(k)]


@pytest.mark.parametrize("sampler", SAMPLERS, ids=[k.id for k in SAMPLERS])
@pytest.mark.parametrize(("options", "features"), ASKED)
def test_every_kernel_draws_as_the_definition(
    sampler: Kernel, options: dict[str, Any], features: set[str]
) -> None:
    """Every combination of filters that a kernel takes gives the reference's tokens."""
    args = arguments(options)
    assert features <= sampler.capability.features and not rejections(sampler, SAMPLE.check(args), HERE)
    assert torch.equal(sampler.load()(*args), SAMPLE.reference(*args))


@pytest.mark.parametrize(
    ("takes", "options", "reasons"),
    [
        (set(), {"top_k": 5}, [Reason.TOP_K_UNSUPPORTED]),
        (set(), {"top_p": 0.5}, [Reason.TOP_P_UNSUPPORTED]),
        ({"top_k", "top_p"}, {"top_k": 5, "top_p": 0.5}, [Reason.TOP_K_WITH_TOP_P]),
        ({"top_k", "top_p"}, {"top_k": 5}, []),
        (BOTH, {"top_k": 5, "top_p": 0.5}, []),
    ],
)
def test_a_kernel_without_a_filter_is_refused(
    takes: set[str], options: dict[str, Any], reasons: list[Reason]
) -> None:
    """A fast kernel that would leave a filter out loses to a slow one that does not, and says why."""
    fast = kernel(
        "fast.sample", lambda logits, *_: logits.argmax(-1), launch_us=0.1, features=frozenset(takes)
    )
    own = device([fast, kernel("slow.sample", launch_us=90.0)])
    args = arguments(options)
    plan = own.plan(SAMPLE, signature_of(SAMPLE, args), args, mode_bits())
    record = plan.selection_for_request()
    assert record.kernel == ("slow.sample" if reasons else "fast.sample")
    assert [r.reason for r in record.candidate("fast.sample").rejected] == reasons


def test_filters_are_keys_of_their_own() -> None:
    """Calls that differ in what they filter by are decided apart; other numbers of one filter are not."""
    own = device([kernel("slow.sample")])
    for options in ({}, {"top_k": 5}, {"top_k": 9}, {"top_p": 0.5}, {"top_k": 5, "top_p": 0.5}):
        args = arguments(options)
        own.plan(SAMPLE, signature_of(SAMPLE, args), args, mode_bits())
    assert own.table(SAMPLE).computed == 4
