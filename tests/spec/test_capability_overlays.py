"""Capabilities in files: exported whole and checked; overlays take away and never give."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import layerzero as lz
from layerzero.backends import load_builtin
from layerzero.graphs.proof import Proofs
from layerzero.measure.shapes import standard_calls
from layerzero.ops import table as ops_table
from layerzero.runtime import Runtime
from layerzero.selection.dispatch_table import capabilities_hash
from layerzero.spec import capability_overlays as capabilities
from layerzero.spec.call_spec import CallSpec
from layerzero.spec.capability import Capability
from layerzero.spec.capability_overlays import (
    AXES,
    FIELDS,
    Overlay,
    content_hash,
    export,
    load_overlay,
    narrow,
    problems,
)
from layerzero.spec.condition import parse_limit
from layerzero.spec.errors import CacheCorruptionError, ConfigurationError
from layerzero.spec.hardware import hypothetical_gpu, probe
from layerzero.spec.kernel import rejections
from tests.kernels import kernel
from tests.profiles import CI

BUILTIN = load_builtin()
FAST = kernel("fast.rms_norm", launch_us=1.0, limits=("N <= 512",))
SLOW = kernel("slow.rms_norm", launch_us=9.0)
X = torch.randn(64, 32)
NORM = ops_table.get("rms_norm")


def written(path: Path, capability: dict[str, Any], name: str = "fast.rms_norm", **more: Any) -> Path:
    path.write_text(json.dumps({"version": 2, "kernels": {name: {"capability": capability}}, **more}))
    return path


def chosen(path: Path | None) -> str:
    """Who runs a norm of 64 rows under an overlay."""
    settings = lz.Settings(
        perfdb=None, shipped_tables=False, warm="off", capabilities=str(path) if path else None
    )
    with Runtime(settings, kernels=lambda: [FAST, SLOW]) as runtime:
        return runtime.device("cpu").launch_planned(NORM, (X, None, 1e-6))[1].kernel


def test_every_kernel_survives_its_document(tmp_path: Path) -> None:
    """What is exported is read back equal, hash included, and every built-in limit can be judged."""
    path = tmp_path / "capabilities.json"
    document = export(BUILTIN)
    capabilities.write(path, document)
    assert capabilities.read(path) == document
    assert {k.id: problems(k.capability) for k in BUILTIN if problems(k.capability)} == {}
    assert document.content == content_hash(export(reversed(BUILTIN)).kernels)


def test_the_hash_follows_every_field() -> None:
    """Another limit, another promise: another hash, which a dispatch table holds too."""
    other = msgspec.structs.replace(FAST.capability, graph_safe=True)
    changed = kernel("fast.rms_norm", graph_safe=True, limits=("N <= 512",))
    assert changed.capability == other
    assert export([FAST]).content != export([changed]).content
    assert capabilities_hash([FAST]) != capabilities_hash([changed])


BROKEN: dict[str, Callable[[dict[str, Any]], Any]] = {
    "version needs 2, got 3": lambda d: d.update(version=3),
    "version needs 2, got True": lambda d: d.update(version=True),
    "needs content": lambda d: d.pop("content"),
    "needs sm_max": lambda d: d["kernels"]["fast.rms_norm"]["capability"].pop("sm_max"),
    "needs error_factor": lambda d: d["kernels"]["fast.rms_norm"].pop("error_factor"),
    "unknown field": lambda d: d["kernels"]["fast.rms_norm"]["capability"].update(sm_least=80),
    "dtypes needs names": lambda d: d["kernels"]["fast.rms_norm"]["capability"].update(dtypes=["float33"]),
    "features needs names": lambda d: d["kernels"]["fast.rms_norm"]["capability"].update(features=["fast"]),
    "sm_max needs at least sm_min": lambda d: d["kernels"]["fast.rms_norm"]["capability"].update(
        sm_min=90, sm_max=80
    ),
    "alignment needs a power of two": lambda d: d["kernels"]["fast.rms_norm"]["capability"].update(
        alignment=24
    ),
    "limits need axes": lambda d: d["kernels"]["fast.rms_norm"]["capability"].update(limits=["Z <= 4"]),
    "unknown field 'Seq'": lambda d: d["kernels"]["fast.rms_norm"]["capability"].update(limits=["Seq <= 4"]),
    "a value of at least 1": lambda d: d["kernels"]["fast.rms_norm"]["capability"].update(limits=["N <= -4"]),
    "error_factor needs more than 0": lambda d: d["kernels"]["fast.rms_norm"].update(error_factor=0.0),
    "do not match its content": lambda d: d["kernels"]["fast.rms_norm"]["capability"].update(contiguous=True),
}


@pytest.mark.parametrize("says", BROKEN)
def test_a_document_that_does_not_hold_is_refused(tmp_path: Path, says: str) -> None:
    """Unknown version, missing field, invalid constraint, changed content: each is named."""
    path = tmp_path / "capabilities.json"
    capabilities.write(path, export([FAST]))
    plain = json.loads(path.read_text())
    BROKEN[says](plain)
    path.write_text(json.dumps(plain))
    with pytest.raises((ConfigurationError, CacheCorruptionError), match=says):
        capabilities.read(path)


def test_an_edited_file_changes_the_choice(tmp_path: Path) -> None:
    """No code changes: the exported file, edited, is the overlay, and another kernel is chosen."""
    path = tmp_path / "capabilities.json"
    assert chosen(None) == "fast.rms_norm"
    capabilities.write(path, export([FAST, SLOW]))
    assert chosen(path) == "fast.rms_norm"
    plain = json.loads(path.read_text())
    plain["kernels"]["fast.rms_norm"]["capability"]["limits"][0] = "N<=32"
    path.write_text(json.dumps(plain))
    with pytest.raises(ConfigurationError, match="every limit that holds"):
        chosen(path)  # a whole entry has to keep the limits that were there
    plain["kernels"]["fast.rms_norm"]["capability"]["limits"].append("N <= 512")
    path.write_text(json.dumps(plain))
    assert chosen(path) == "slow.rms_norm"


NARROWER: dict[str, Any] = {
    "platforms": ["cpu"], "sm_min": 90, "sm_max": 100, "mma_families": ["wgmma"], "cpu_vendors": ["amd"],
    "archs": ["gfx942"], "isa": ["avx2"], "half_isa": ["avx512bw"],
    "torch_min": "2.12", "torch_below": "2.14", "cuda_min": "12.9", "driver_min": "570",
    "dtypes": ["float32"], "mixed_dtypes": False, "index_dtypes": ["int64"], "features": [],
    "only_with": ["top_k"], "layouts": ["BHSD"], "contiguous": True, "last_stride1": True, "alignment": 16,
    "limits": ["N <= 256"], "gradient": False, "deterministic": False,
    "batch_invariant": False, "graph_safe": False, "autocast": False, "tp_invariant": False,
}  # fmt: skip
WIDER: dict[str, Any] = {
    "platforms": ["cpu", "cuda", "rocm", "mps"], "sm_min": 70, "sm_max": 120,
    "mma_families": ["wgmma", "tcgen05"],
    "cpu_vendors": ["amd", "intel"], "archs": ["gfx942", "gfx950"], "isa": [], "half_isa": [],
    "torch_min": "2.10", "torch_below": "2.15", "cuda_min": None,
    "driver_min": "560", "dtypes": ["float32", "int8"], "mixed_dtypes": True,
    "index_dtypes": ["int64", "int32"], "features": ["causal"],
    "only_with": ["top_k", "top_p"], "layouts": ["BHSD", "BSHD"],
    "contiguous": False, "last_stride1": False, "alignment": 8,
    "limits": ["N <= 1024"], "gradient": True, "deterministic": True,
    "batch_invariant": True, "graph_safe": True, "autocast": True, "tp_invariant": True,
}  # fmt: skip


@pytest.mark.parametrize("field", sorted(set(FIELDS) - {"source", "narrowed"}))
def test_every_field_narrows_and_none_widens(tmp_path: Path, field: str) -> None:
    """Each field can be taken from; giving it back on top of that is refused with what to do instead."""
    start = kernel("fast.rms_norm", sm_min=80, torch_min="2.11", tp_invariant=True, batch_invariant=True,
                   graph_safe=True, limits=("N <= 512",))  # fmt: skip
    overlay = load_overlay(written(tmp_path / "o.json", {field: NARROWER[field]}), [start])
    smaller = overlay.apply(start)
    assert smaller is not start and smaller.capability.narrowed == {field}
    assert "narrowed by" in smaller.capability.source and smaller.load is start.load
    with pytest.raises(ConfigurationError, match=f"{field} needs .*an overlay may only narrow"):
        load_overlay(written(tmp_path / "w.json", {field: WIDER[field]}), [smaller])
    with pytest.raises(ConfigurationError, match="narrow"):
        load_overlay(written(tmp_path / "n.json", {"narrowed": ["dtypes"]}), [start])


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("version: 3\nkernels: {a.b: {capability: {}}}", "version needs 2, got 3"),
        ("kernels: {a.b: {capability: {}}}", "version needs 2, got None"),
        ("version: 2", "kernels needs a mapping"),
        ("version: 2\nrules: {}\nkernels: {fast.rms_norm: {capability: {}}}", "'rules' is no part"),
        ("version: 2\nkernels:\n  fast.rms_nrom: {capability: {}}", ":3: fast.rms_nrom: no kernel"),
        ("version: 2\nkernels:\n  fast.rms_norm: {capability: {dtype: [float32]}}", "unknown field 'dtype'"),
        ("version: 2\nkernels:\n  fast.rms_norm: {capability: {sm_min: high}}", "sm_min"),
        ("version: 2\nkernels:\n  fast.rms_norm: {capability: []}", "capability needs a mapping"),
        ("version: 2\nkernels:\n  fast.rms_norm: {op: linear, capability: {}}", "op needs rms_norm"),
        ("version: 2\nkernels:\n  fast.rms_norm: {limit: 3, capability: {}}", "'limit' is no part"),
        ("version: 2\nkernels:\n  fast.rms_norm:\n    capability: {limits: [N <= 4 unless grad]}",
         "limits: limits needs"),
        ("version: 2\nkernels:\n  fast.rms_norm: {capability: {limits: ['N in []']}}",
         "at least one value"),
        ("version: 2\nkernels:\n  fast.rms_norm: {capability: {dtypes: []}}", "dtypes needs at least one"),
        ("not: [closed", "yaml"),
    ],
)  # fmt: skip
def test_what_is_not_understood_is_refused(tmp_path: Path, text: str, says: str) -> None:
    """A mistyped name would protect nothing: no runtime opens with it; file and line are named."""
    path = tmp_path / "overlay.yaml"
    path.write_text(text)
    with pytest.raises(ConfigurationError, match=says if says != "yaml" else str(path)):
        load_overlay(path, [FAST])
    with pytest.raises(ConfigurationError):
        chosen(path)


VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(-5, 200), st.text(max_size=4), st.just("2.12"),
    st.lists(st.sampled_from(("cpu", "cuda", "float32", "bfloat16", "causal", "int64", "avx2", "amd"))),
    st.lists(st.builds(
        "{} {}".format, st.sampled_from([*sorted(AXES)[:4], "N", "C", "Seq"]),
        st.builds("{} {}".format, st.sampled_from(["<=", ">=", "==", "~"]), st.integers(-2, 600))
        | st.builds("% {} == 0".format, st.integers(-2, 600)),
    ), max_size=2),
)  # fmt: skip


DTYPE = st.sampled_from(["float32", "bfloat16", "float16"])
OTHER_DTYPE = st.sampled_from(["", "int64"])
REQUESTS = st.builds(
    lambda dtype, other, n, c, **rest: CallSpec(
        op="rms_norm", dtype=dtype, dtypes=(dtype, other or dtype), dims={"N": n, "C": c}, **rest
    ),
    DTYPE, OTHER_DTYPE, st.integers(1, 600), st.integers(1, 64),
    features=st.frozensets(st.sampled_from(["causal", "mask_bool", "no_weight"])),
    modes=st.frozensets(st.sampled_from(["grad", "capture", "deterministic"])),
    contiguous=st.booleans(), alignment=st.sampled_from([2, 16, 64]),
)  # fmt: skip


@settings(max_examples=2_000 if CI else 300)
@given(
    changes=st.dictionaries(st.sampled_from([*FIELDS, "sm_least"]), VALUES, min_size=1, max_size=4),
    request=REQUESTS,
)
def test_whatever_stands_in_a_file_nothing_is_widened(changes: dict[str, Any], request: CallSpec) -> None:
    """Random fields with random values: refused, or every call that is still taken was taken before."""
    try:
        fields = {n: msgspec.convert(v, capabilities._HINTS[n]) for n, v in changes.items() if n in FIELDS}
        narrowed = narrow(FAST.id, FAST.capability, fields, "a file")
    except (msgspec.ValidationError, ConfigurationError):
        return
    smaller = Overlay(changes={FAST.id: fields}).apply(FAST)
    assert smaller.capability.limits == narrowed.limits
    for hardware in (probe("cpu"), hypothetical_gpu(90)):
        if not rejections(smaller, request, hardware):
            assert not rejections(FAST, request, hardware)


def test_a_limit_meant_to_widen_is_told(tmp_path: Path) -> None:
    """A bound beyond the one that holds changes nothing; who wrote it is told so."""
    limits = ("N <= 512", "C % 8 == 0", "D in [64, 128]")
    start = Capability(source="a test", limits=limits)
    for wider in ("N <= 513", "C % 4 == 0", "D in [64, 96]"):
        with pytest.raises(ConfigurationError, match="every limit that holds"):
            narrow("a.b", start, {"limits": (wider,)}, "a file")
    for tighter in ("N <= 511", "C % 16 == 0", "D in [64]"):
        assert narrow("a.b", start, {"limits": (tighter,)}, "a file").limits == (*limits, tighter)


def test_a_proof_does_not_undo_an_overlay(tmp_path: Path) -> None:
    """A kernel that a deployment took out of captures stays out, whatever was proved here."""
    start = kernel("fast.rms_norm", graph_safe=True)
    small = load_overlay(written(tmp_path / "o.json", {"graph_safe": False}), [start]).apply(start)
    proofs = Proofs(probe("cpu"))
    proofs.add(small, "a case", ())
    (applied,) = proofs.apply([small], strict=False)
    assert not applied.capability.graph_safe
    proofs.add(start, "a case", ())
    assert proofs.apply([start], strict=True)[0].capability.graph_safe


def test_the_digest_is_in_the_record_and_the_key(tmp_path: Path) -> None:
    """A selection names the overlay that it was made under; another overlay is another table."""
    seen = []
    for value in (256, 128):
        path = written(tmp_path / f"{value}.json", {"limits": [f"N <= {value}"]})
        settings = lz.Settings(perfdb=None, shipped_tables=False, warm="off", capabilities=str(path))
        with Runtime(settings, kernels=lambda: [FAST, SLOW]) as runtime:
            device = runtime.device("cpu")
            table = device.table(NORM)
            plan = device.launch_planned(NORM, (X, None, 1e-6))[1]
            assert plan.selection.overlay and plan.selection.as_plain()["overlay"] == plan.selection.overlay
            seen.append((plan.selection.overlay, table.fingerprint))
            with pytest.raises(ConfigurationError, match="open another"):
                runtime.reconfigure(settings.replace(capabilities=None))
    assert seen[0][0] != seen[1][0] and seen[0][1] != seen[1][1]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_axes_are_those_of_the_ops(device: str) -> None:
    """Every axis that a bound of a built-in kernel speaks of, and of every standard call, is known."""
    limits = [(text, parse_limit(text)) for k in BUILTIN for text in k.capability.limits]
    bounds = {axis for _, limit in limits for axis in limit.condition.axes}
    assert all(str(limit) == text for text, limit in limits), "one spelling of each"
    assert bounds <= AXES
    assert standard_calls(None, device, True)
