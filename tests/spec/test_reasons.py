"""Reasons are stable names with a text and a category, and survive JSON."""

from __future__ import annotations

import msgspec
import pytest

from layerzero.spec.capability import FEATURE_REASONS
from layerzero.spec.hardware import GPUGeneration
from layerzero.spec.reasons import Category, Reason, Rejected, as_plain

# One of each category: what a rule or a dashboard of another release may have written down.
KNOWN = {
    "ISA_MISSING": Category.HARDWARE,
    "DTYPE_UNSUPPORTED": Category.DTYPE,
    "HEAD_DIM_TOO_LARGE": Category.SHAPE,
    "NOT_CONTIGUOUS": Category.MEMORY_LAYOUT,
    "GQA_UNSUPPORTED": Category.FEATURE,
    "NO_GRADIENT": Category.MODE,
    "BACKEND_MISSING": Category.BACKEND,
    "CIRCUIT_OPEN": Category.HEALTH,
    "POLICY_DENIED": Category.POLICY,
    "MEMORY_HEADROOM_EXCEEDED": Category.RESOURCE,
    "DISPATCH_TABLE_MISS": Category.DISPATCH_TABLE,
    "BUNDLE_DAMAGED": Category.BUNDLE,
    "BLOCK_CYCLIC": Category.BLOCK,
    "PLAN_DAMAGED": Category.PLAN,
    "REPORT_FORMAT": Category.REPORT,
    "BASELINE_STALE": Category.GATE,
    "TOKENIZER_CHANGED": Category.TOKENIZER,
}


def test_a_code_is_its_own_name() -> None:
    """What is written to logs, files and metrics is the name in the source; each has a text of its own."""
    assert {reason.value: reason.name for reason in Reason} == {name: name for name in Reason.__members__}
    assert len({reason.summary for reason in Reason}) == len(Reason)


def test_every_category_is_that_of_its_reasons() -> None:
    """A reason speaks about one side of the call; no category stands empty."""
    assert {name: Reason[name].category for name in KNOWN} == KNOWN
    assert {reason.category for reason in Reason} == set(Category) == set(KNOWN.values())


def test_generations_and_features_are_stable_names() -> None:
    """Both are written to files, too: generations by number, features by name."""
    assert {g.name: int(g) for g in GPUGeneration} == {
        "TURING": 75, "AMPERE": 80, "ADA_LOVELACE": 89, "HOPPER": 90, "BLACKWELL": 100, "UNKNOWN": 999,
    }  # fmt: skip
    assert {"causal", "mask_bool", "gqa", "window", "softcap", "alibi", "lse"} <= FEATURE_REASONS.keys()


@pytest.mark.parametrize("reason", Reason)
def test_a_rejection_survives_json(reason: Reason) -> None:
    """Every field comes back as it was; the plain form holds all of them and the category."""
    rejected = Rejected(reason, "D", ">= 32", "16", "D >= 32")
    assert msgspec.json.decode(msgspec.json.encode(rejected), type=Rejected) == rejected
    assert as_plain(rejected) == {
        "reason": reason.name, "category": reason.category.value, "field": "D", "needs": ">= 32", "got": "16",
        "counterfactual": "D >= 32",
    }  # fmt: skip
    assert str(rejected) == f"{reason.name}: D needs >= 32, got 16"
