"""Rules for several ops at once: `rms_*` stands wherever the name of an op does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import layerzero as lz
from layerzero.selection.policy.policy import Policy
from layerzero.selection.policy.rules import make_rule
from layerzero.spec.call_spec import CallSpec
from layerzero.spec.errors import PolicyValidationError

X, WEIGHT = torch.randn(4, 64), torch.randn(64)
PLAIN = {"perfdb": None, "shipped_tables": False, "warm": "off", "device": "cpu"}


@pytest.fixture
def runtime() -> Iterator[None]:
    """A runtime with the kernels of this machine and nothing measured."""
    with lz.start(lz.Settings(**PLAIN), scoped=True):  # type: ignore[arg-type]
        yield


def chosen() -> tuple[str, str]:
    """The kernels of a norm and of a product."""
    return lz.which("rms_norm", X, WEIGHT), lz.which("linear", X, torch.randn(8, 64))


@pytest.mark.parametrize(
    ("op", "concerned"),
    [
        ("rms_*", {"rms_norm"}),
        ("*_norm", {"rms_norm", "layer_norm", "add_rms_norm"}),
        ("*norm/grad", {"rms_norm", "layer_norm", "add_rms_norm"}),
        ("?inear", {"linear"}),
        ("[lr]*", {"rms_norm", "layer_norm", "linear"}),
        ("*", {"rms_norm", "layer_norm", "add_rms_norm", "linear"}),
    ],
)
def test_a_rule_of_a_glob_concerns_the_ops_that_match(op: str, concerned: set[str]) -> None:
    """Verdict, conditions and a table's fingerprint all read it alike."""
    rule = make_rule("deny", "x*", op=op, when="N > 7")
    policy = Policy((rule,))
    for name in ("rms_norm", "layer_norm", "add_rms_norm", "linear"):
        request = CallSpec(op=name, dims={"N": 8}, modes=frozenset({"grad"}))
        assert policy.verdict("x.y", "x", request).allowed == (name not in concerned)
        assert rule.applies(request) == bool(policy.conditions(name)) == (name in concerned)


@pytest.mark.parametrize("way", ["file", "environment", "program", "block", "lock"])
def test_a_glob_of_ops_stands_wherever_a_rule_is_written(
    runtime: None, way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a file, a variable, the program, a block and a lock: norms follow it, products do not."""
    before = chosen()
    if way == "file":
        (tmp_path / "policy.yaml").write_text("rules:\n  - prefer: reference\n    op: rms_*\n")
        lz.load_policy(tmp_path / "policy.yaml")
    elif way == "environment":
        monkeypatch.setenv("LAYERZERO_PREFER", "*_norm=reference")
        with lz.start(lz.Settings(**PLAIN), scoped=True):  # type: ignore[arg-type]
            assert chosen() == ("reference.rms_norm", before[1])
        return
    elif way == "program":
        lz.add_policy(prefer="reference", op="rms_*")
    elif way == "lock":
        lz.lock("rms_*", "reference")
        assert lz.get_locks() == {"rms_*": "reference"}
    if way == "block":
        with lz.prefer("reference", op="rms_*"):
            assert chosen() == ("reference.rms_norm", before[1])
    else:
        assert chosen() == ("reference.rms_norm", before[1])
        lz.unlock("rms_*")
        assert way != "lock" or chosen() == before


def test_a_glob_that_matches_no_op_is_an_unknown_op(runtime: None) -> None:
    """A lock of it, and a file of it under strict, name it with near names."""
    with pytest.raises(PolicyValidationError, match=r"unknown op 'rsm_\*'"):
        lz.lock("rsm_*", "reference")
    for op in ("*", "**"):
        with pytest.raises(PolicyValidationError, match="lock needs an op"):
            lz.lock(op, "reference")
