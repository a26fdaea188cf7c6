"""What is special about Liger: it writes where callers read, and its adapters must not."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path

import pytest
import torch

from layerzero.backends import availability
from layerzero.backends.liger import KERNELS
from layerzero.ops import table
from layerzero.spec.call_spec import CallSpec
from layerzero.spec.hardware import hypothetical_gpu, probe
from layerzero.spec.kernel import rejections
from tests import children, interpreter
from tests.backends import cases

MISSING = importlib.util.find_spec("liger_kernel") is None
needs_liger = pytest.mark.skipif(MISSING, reason="liger-kernel is not installed")

LOSS = """
import json, warnings
import torch
from layerzero.backends.liger import KERNELS
from layerzero.ops import table
warnings.simplefilter("ignore")
run = next(k for k in KERNELS if k.op == "cross_entropy").load()
source = torch.Generator().manual_seed(0)
logits, target = torch.randn(9, 50, generator=source), torch.randint(0, 50, (9,), generator=source)
target[3] = -100
found = []
for reduction in ("none", "mean", "sum"):
    own, kept = logits.clone().requires_grad_(), logits.clone()
    args = (own, target, None, -100, 0.0, reduction)
    weigh = torch.arange(9.0).cos() if reduction == "none" else torch.tensor(1.7)
    pair = []
    for function in (run, table.get("cross_entropy").reference):
        loss = function(*args)
        (gradient,) = torch.autograd.grad((loss * weigh).sum(), [own])
        pair.append((loss.detach(), gradient))
    differences = [float((a - b).abs().max()) for a, b in zip(*pair)]
    found.append([reduction, bool(torch.equal(own.detach(), kept)), *differences])
print(json.dumps(found))
"""


@needs_liger
@pytest.mark.timeout(900)
def test_the_loss_leaves_the_logits_alone(tmp_path: Path) -> None:
    """Liger's function puts the gradient where the logits were; ours gives the same loss and gradient."""
    if wrong := interpreter.why_not():
        pytest.skip(wrong)
    variables = os.environ | {"TRITON_INTERPRET": "1"}
    run = children.run(LOSS, folder=tmp_path, variables=variables, timeout=800.0)
    assert run.returncode == 0, run.stderr[-2000:]
    rows = json.loads(run.stdout.splitlines()[-1])
    assert [row[0] for row in rows] == ["none", "mean", "sum"]
    for _, kept, loss, gradient in rows:
        assert kept and loss < 1e-5 and gradient < 1e-6


def test_the_cpu_is_refused_with_its_reason_and_a_gpu_accepted() -> None:
    """Without a GPU every kernel says so; on one that supports it a plain call is taken."""
    for kernel in KERNELS:
        reasons = {r.reason.value for r in rejections(kernel, _request(kernel.op), probe("cpu"))}
        assert reasons == {"PLATFORM_MISMATCH"}
        assert rejections(kernel, _request(kernel.op).replace(platform="cuda"), hypothetical_gpu(90)) == []
        assert not MISSING or availability(kernel)[0].reason.value == "BACKEND_MISSING"


def _request(op: str) -> CallSpec:
    """A plain call of the op in bfloat16, as a request."""
    asks = ("act_swiglu",) if op == "mlp" else ()
    return table.get(op).check(cases.call(cases.Case(op, asks), torch.bfloat16))


def test_the_exact_gelu_is_not_taken_for_its_approximation() -> None:
    """Liger's geglu is the tanh approximation, so the exact kind is refused."""
    kernel = next(k for k in KERNELS if k.op == "mlp")
    assert "act_geglu_tanh" in kernel.capability.features and "act_geglu" not in kernel.capability.features
