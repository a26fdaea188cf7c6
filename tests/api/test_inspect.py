"""which == explain == select == executed, for random calls; and what inspection says to people."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import layerzero as lz
import layerzero.sync
from layerzero.backends import load_builtin
from layerzero.runtime import current
from layerzero.spec.hardware import Hardware
from tests import children


@pytest.fixture(autouse=True)
def own_runtime() -> Iterator[None]:
    """Nothing that a test configures reaches another."""
    with lz.start(lz.Settings(warm="off")):
        yield


@st.composite
def calls(draw: st.DrawFn) -> tuple[str, tuple[Any, ...], dict[str, Any]]:
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16]))
    op = draw(st.sampled_from(["attention", "linear", "rms_norm", "layer_norm", "mlp"]))
    rows, width = draw(st.integers(1, 70)), draw(st.sampled_from([8, 16, 48]))
    if op == "attention":
        heads_k, group = draw(st.integers(1, 2)), draw(st.integers(1, 3))
        sq, sk = draw(st.integers(1, 20)), draw(st.integers(1, 20))
        q = torch.randn(1, heads_k * group, sq, width).to(dtype)
        k, v = (torch.randn(1, heads_k, sk, width).to(dtype) for _ in range(2))
        keywords: dict[str, Any] = {"is_causal": draw(st.booleans()), "return_lse": draw(st.booleans())}
        if draw(st.booleans()):
            keywords["window"] = (draw(st.integers(-1, 5)), draw(st.integers(-1, 5)))
        return op, (q, k, v), keywords
    x = torch.randn(rows, width).to(dtype)
    weights: dict[str, tuple[Any, ...]] = {
        "linear": (torch.randn(5, width).to(dtype),),
        "rms_norm": (torch.randn(width).to(dtype),),
        "layer_norm": (torch.randn(width).to(dtype), torch.randn(width).to(dtype)),
        "mlp": (torch.randn(12, width).to(dtype), torch.randn(width, 6).to(dtype)),
    }
    return op, (x, *weights[op]), {}


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(calls())
def test_which_explain_select_and_the_kernel_that_ran_agree(call: tuple[str, Any, Any]) -> None:
    """E12: four ways of asking, one answer."""
    op, args, keywords = call
    named = lz.which(op, *args, **keywords)
    explained = lz.explain(op, *args, **keywords).selection
    selected = lz.select(op, *args, **keywords)
    getattr(layerzero.sync, op)(*args, **keywords)
    ran = lz.last_selection()
    assert ran is not None
    assert named == explained.kernel == selected.kernel == ran.kernel
    assert explained.transforms == selected.transforms == ran.transforms
    assert ran.request == lz.validate(op, *args, **keywords).replace(modes=ran.request.modes)


def test_an_explanation_shows_every_kernel_with_its_reasons() -> None:
    """The text names the chosen kernel first, then prices, reasons and hints; the JSON holds the same."""
    q = torch.randn(1, 2, 4, 8)
    explanation = lz.explain("attention", q, q, q, is_causal=True)
    text = str(explanation)
    assert all(info.id in text for info in lz.list_kernels("attention"))
    assert "PLATFORM_MISMATCH" not in text
    last = text.splitlines()[-1]
    assert last.startswith("   for other kinds of device: ") and "torch.attention.sdpa_flash," in last
    first = next(line for line in text.splitlines() if line.startswith(" * "))
    assert explanation.selection.kernel in first and ("us roofline" in first or "us shipped table" in first)
    record = json.loads(explanation.as_json())
    assert {c["kernel"] for c in record["candidates"]} == {i.id for i in lz.list_kernels("attention")}
    rejected = next(c for c in record["candidates"] if c["kernel"] == "torch.attention.sdpa_flash")
    assert rejected["rejected"][0]["reason"] == "PLATFORM_MISMATCH"
    assert rejected["rejected"][0]["category"] == "hardware"


def test_an_unknown_op_lists_the_ops() -> None:
    """FS-030: the error teaches."""
    with pytest.raises(
        lz.UnknownOpError, match=r"unknown op 'atention'; did you mean attention\b.*\?.*rms_norm"
    ):
        lz.which("atention", torch.randn(1, 2, 4, 8))


def test_a_refusal_lists_every_kernel_and_the_nearest_counterfactual() -> None:
    """EC-026: nothing accepted means every kernel's reasons, and what would help."""
    x = torch.randn(3, 8)
    lz.lock("rms_norm", "torch")
    with lz.disable("*", op="rms_norm"), pytest.raises(lz.NoKernelFoundError) as caught:
        layerzero.sync.rms_norm(x)
    text = str(caught.value)
    assert all(info.id in text for info in lz.list_kernels("rms_norm"))
    assert "POLICY_DENIED" in text
    assert "nearest:" in text
    assert {c.kernel for c in caught.value.trace} == {i.id for i in lz.list_kernels("rms_norm")}


def test_no_kernel_registered_says_so() -> None:
    """EC-025: an empty registry is named as such."""
    with lz.start(scoped=True) as runtime:
        for info in runtime.device("cpu").registry.for_op("alibi"):
            runtime.remove_kernel(info.id)
        with pytest.raises(lz.NoKernelAvailableError, match="no candidates found for alibi"):
            layerzero.sync.alibi(lz.alibi_slopes(4), 2, 2)


# Kernels of attention that an H200 runs and a CPU does not.
ON_HOPPER_ALONE = {
    kernel.id
    for kernel in load_builtin(op="attention")
    if "cuda" in kernel.capability.platforms and "cpu" not in kernel.capability.platforms
}


def test_dry_run_asks_about_other_hardware() -> None:
    """NO-025: a laptop can ask what an H200 would run; nothing is executed."""
    hopper = Hardware(
        platform="cuda", device="cuda:0", name="H200", vendor="nvidia", sm=90, torch="2.13.0", cuda="13.0",
        peak_flops={"bfloat16": 7.9e14, "float32": 5e13}, bandwidth=4.3e12,
    )  # fmt: skip
    q = torch.randn(1, 32, 64, 128).bfloat16()
    k = torch.randn(1, 8, 64, 128).bfloat16()
    selection = lz.dry_run("attention", q, k, k, is_causal=True, hardware=hopper)
    assert (selection.request.platform, selection.request.device) == ("cuda", "cuda:0")
    assert selection.kernel in ON_HOPPER_ALONE and selection.candidate(selection.kernel).eligible
    verdict = selection.candidate("torch.attention.sdpa_flash_cpu")
    assert [r.reason for r in verdict.rejected] == [lz.Reason.PLATFORM_MISMATCH]
    turing = lz.Hardware(platform="cuda", device="cuda:0", name="T4", vendor="nvidia", sm=75, torch="2.13.0")
    older = lz.dry_run("attention", q, k, k, is_causal=True, hardware=turing)
    assert lz.Reason.SM_TOO_OLD in {r.reason for r in older.candidate("torch.attention.sdpa_flash").rejected}


def test_empty_calls_run_no_kernel() -> None:
    """EC-001: an empty batch or sequence gives an empty result, and no decision is made."""
    before = current().counters.total("selections")
    out = layerzero.sync.attention(torch.randn(0, 2, 4, 8), torch.randn(0, 2, 4, 8), torch.randn(0, 2, 4, 8))
    assert out.shape == (0, 2, 4, 8)
    assert layerzero.sync.rms_norm(torch.randn(0, 8)).shape == (0, 8)
    assert lz.which("rms_norm", torch.randn(0, 8)) == ""
    assert current().counters.total("selections") == before


def test_which_asks_about_a_batch_that_does_not_exist_yet() -> None:
    """`batch=` answers for that many callers merged."""
    x, weight = torch.randn(1, 16), torch.randn(8, 16)
    assert lz.which("linear", x, weight, batch=64) in {info.id for info in lz.list_kernels("linear")}
    with pytest.raises(ValueError, match="batch needs an int in \\[1, 65536\\], got 0"):
        lz.which("linear", x, weight, batch=0)


def test_list_kernels_filters_and_teaches() -> None:
    """By op, by backend; an unknown one lists what there is."""
    assert {info.op for info in lz.list_kernels("rope")} == {"rope"}
    assert {info.backend for info in lz.list_kernels(backend="reference")} == {"reference"}
    with pytest.raises(ValueError, match="backend needs one of"):
        lz.list_kernels(backend="nonesuch")


def test_keys_are_stable_across_processes(tmp_path: Path) -> None:
    """The reduced key of a request does not depend on the process or its hash seed."""
    program = (
        "import torch, layerzero as lz\n"
        "from layerzero.runtime import current\n"
        "from layerzero.ops import table\n"
        "op = table.get('attention'); q = torch.zeros(2, 4, 7, 16)\n"
        "t = current().device('cpu').table(op)\n"
        "request = t.describe(op.build(q, q, q, is_causal=True)[1], 0)\n"
        "print(repr(t._key_maker.key(request.replace(alignment=64))))\n"
    )
    # The child has the hash seed that this run drew; a number given to a new interpreter is not that one.
    other = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"PYTHONHASHSEED": "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert "attention" in other and other == children.run(program, folder=tmp_path).stdout


def test_a_backend_that_is_unknown_is_named_as_it_was_given() -> None:
    """`backend=` is no lock to its caller."""
    with pytest.raises(lz.PolicyValidationError, match=r"^backend names no kernel known here: 'tritn'"):
        lz.which("rms_norm", torch.randn(2, 8), backend="tritn")
    with pytest.raises(lz.PolicyValidationError, match=r"^lock names no kernel known here: 'tritn'"):
        lz.lock("rms_norm", "tritn")


def test_more_calls_than_a_batch_ever_holds_are_refused() -> None:
    """They were made one by one, until memory ended."""
    with pytest.raises(ValueError, match=r"batch needs an int in \[1, 65536\], got 100000000"):
        lz.which("rms_norm", torch.randn(2, 8), batch=100_000_000)


def test_a_batch_of_calls_needs_each_ones_arguments_by_name() -> None:
    """A tensor, or one call alone, is named as what it is."""
    x = torch.randn(2, 8)
    for calls in ([x], {"x": x}):
        with pytest.raises(TypeError, match=r"calls needs each call's arguments by name, got (Tensor|str)"):
            lz.select_batch("rms_norm", calls)  # type: ignore[arg-type]
