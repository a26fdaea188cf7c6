"""What a bound callable holds on to: the policy of the context that bound it, whoever calls it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import layerzero as lz
from layerzero.runtime import Runtime
from tests import kernels

X = torch.randn(4, 16)


@pytest.fixture
def runtime() -> Iterator[Runtime]:
    """One whose choices follow from estimates alone."""
    with lz.start(lz.Settings(warm="off", perfdb=None, shipped_tables=False), scoped=True) as opened:
        yield opened


def test_who_calls_it_in_a_scope_leaves_it_as_it_was_to_the_others(runtime: Runtime) -> None:
    """It is bound again by the first call after a change, which may be in a block of its caller's own."""
    bound = lz.bind("rms_norm", X)
    usual = bound.binding.plan.kernel
    assert usual != "reference.rms_norm"
    for _ in range(2):
        runtime.device("cpu").refresh()
        with lz.prefer("reference"):
            bound(X)
        bound(X)
        assert bound.binding.plan.kernel == usual


def test_one_that_is_bound_in_a_scope_stays_under_its_rules(runtime: Runtime) -> None:
    """Also where it is bound again outside of it."""
    with lz.prefer("reference"):
        bound = lz.bind("rms_norm", X)
    for _ in range(2):
        bound(X)
        assert bound.binding.plan.kernel == "reference.rms_norm"
        runtime.device("cpu").refresh()


def test_who_calls_it_in_another_mode_leaves_the_others_their_gradient(runtime: Runtime) -> None:
    """It is bound again under the modes that it was bound in, whoever asks first after a change."""
    fast = kernels.kernel("fast.rms_norm", lambda x, *_: x.detach().clone(), launch_us=0.0, gradient=False)
    runtime.add_kernel(fast)
    lz.add_policy(prefer="fast", op="rms_norm")
    rows = X.clone().requires_grad_()
    bound = lz.bind("rms_norm", rows)
    for _ in range(2):
        with torch.no_grad():
            assert torch.equal(bound(rows), rows)
        assert bound(rows).requires_grad
        runtime.device("cpu").refresh()
