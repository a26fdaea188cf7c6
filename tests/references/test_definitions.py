"""Published definitions through our ops; what is skipped says why."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import layerzero as lz
from tests.references.conftest import Asked
from tests.references.definitions import UNSET, Definition, files, parse, workloads
from tests.references.experts import in_codes, smaller
from tests.references.measures import check_close
from tests.references.ours import (
    CALLS,
    MAX_BYTES,
    MEDIUM,
    OPS,
    SMALL,
    Size,
    inputs_of,
    kind_of,
    scale_of,
    why_not,
)
from tests.references.truths import need_agreement, published, truths_on

FILES = files()
NOT_HERE = (lz.NoKernelFoundError, lz.BackendNotAvailableError)
EVERYTHING = 64 << 30  # with --all
needs_definitions = pytest.mark.skipif(not FILES, reason=UNSET)
each = pytest.mark.parametrize("path", FILES or [Path("none")], ids=lambda p: p.stem)


@pytest.fixture(scope="module", autouse=True)
def opened(runtime: lz.Runtime) -> lz.Runtime:
    """Everything here runs in it."""
    return runtime


def ready(path: Path, size: Size, asked: Asked) -> tuple[Definition, dict[str, Any]]:
    """A definition and inputs for it; skips with the reason where it has no op or is too large here."""
    definition = parse(path.read_text(), path.name)
    definition = smaller(definition) if definition.op_type == "moe" and not asked.everything else definition
    reason = why_not(definition, size, EVERYTHING if asked.everything else MAX_BYTES)
    if reason:
        pytest.skip(f"{definition.name}: {reason}")
    made = inputs_of(definition, size)
    return definition, {n: v.to(asked.device) if isinstance(v, Tensor) else v for n, v in made.items()}


@needs_definitions
@each
def test_every_file_follows_the_schema(path: Path) -> None:
    """Axes, ports and the reference's source parse and compile; the name is the file's."""
    definition = parse(path.read_text(), path.name)
    assert callable(definition.compiled())
    assert definition.name == path.stem and definition.op_type == path.parent.name


@needs_definitions
@each
def test_results_agree(path: Path, asked: Asked) -> None:
    """Shapes, dtypes and values of each output, from every backend here that takes the call."""
    definition, inputs = ready(path, SMALL, asked)
    wanted = published(definition, inputs)
    assert wanted is not None
    for backend in _backends(definition):
        try:
            got = CALLS[kind_of(definition)](definition, inputs, backend=backend)
        except NOT_HERE:
            continue
        if definition.op_type == "sampling":
            _check_samples(definition, inputs, got[0])
            continue
        for name, one, other in zip(definition.outputs, got, wanted, strict=True):
            assert one.shape == other.shape, f"{name} by {backend or 'the choice'}"
            dtype = getattr(torch, definition.outputs[name].dtype)
            assert one.dtype == dtype, f"{name} by {backend or 'the choice'}"
        check_close(got, wanted, list(definition.outputs), asked.tolerance * scale_of(definition))


def _backends(definition: Definition) -> list[str | None]:
    found = {info.backend for info in lz.list_kernels(OPS[kind_of(definition)]) if info.state != "blocked"}
    return [None, *sorted(found)]


def _check_samples(definition: Definition, inputs: dict[str, Any], samples: torch.Tensor) -> None:
    """Whatever is drawn may be drawn: it is among what the filters leave, and a filter of one leaves one."""
    assert samples.shape == (len(inputs["probs"]),)
    for row, probs in enumerate(inputs["probs"].double()):
        order = probs.sort(descending=True)
        kept = probs.clone()
        if "top_k" in inputs:
            kept[order.indices[int(inputs["top_k"][row]) :]] = 0
            kept /= kept.sum()
        if "top_p" in inputs:
            sums = kept[order.indices].cumsum(0)
            first = int((sums < float(inputs["top_p"][row]) - 1e-6).sum())
            kept[order.indices[first + 1 :]] = 0
        assert kept[samples[row]] > 0, f"row {row}: {int(samples[row])} was filtered out"
        if int((kept > 0).sum()) == 1:
            assert int(samples[row]) == int(probs.argmax())


@needs_definitions
@each
def test_truths_agree(path: Path, asked: Asked) -> None:
    """The published source, plain torch, our float64 reference and, on a card, FlashInfer say the same."""
    definition, inputs = ready(path, SMALL, asked)
    found = {name: truth(definition, inputs) for name, truth in truths_on(asked.device).items()}
    answers = {name: outs for name, outs in found.items() if outs is not None}
    if definition.op_type == "sampling":
        for drawn in answers.values():
            _check_samples(definition, inputs, drawn[0])
        return
    need_agreement(answers, list(definition.outputs), asked.tolerance * scale_of(definition))


@needs_definitions
@each
def test_results_repeat(path: Path, asked: Asked) -> None:
    """The same inputs (and seed) give the same bits twice."""
    definition, inputs = ready(path, SMALL, asked)
    first, second = (CALLS[kind_of(definition)](definition, inputs) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@needs_definitions
@pytest.mark.parametrize("form", ["mxfp4", "nvfp4"])
@each
def test_experts_of_four_bits_agree_in_their_codes(path: Path, form: str, asked: Asked) -> None:
    """Where a name says four bits, its source gets the numbers that our kernels read as codes."""
    if "fp4" not in path.stem:
        pytest.skip(f"{path.stem}: no experts of four bits")
    definition, inputs = ready(path, SMALL, asked)
    rounded, codes = in_codes(definition, inputs, form)
    wanted = published(definition, rounded)
    assert wanted is not None and not torch.equal(rounded["gemm1_weights"], inputs["gemm1_weights"])
    for backend in _backends(definition):
        try:
            got = CALLS["moe"](definition, rounded, backend=backend, **codes)
        except NOT_HERE:
            continue
        check_close(got, wanted, list(definition.outputs), asked.tolerance * scale_of(definition))


@needs_definitions
@pytest.mark.long
@each
def test_recorded_and_larger_sizes_agree(path: Path, asked: Asked) -> None:
    """The smallest and the median recorded workload where their axes alone decide, else medium sequences."""
    definition, inputs = ready(path, MEDIUM, asked)
    if definition.op_type == "sampling":
        pytest.skip(f"{definition.name}: samples are checked at small sizes")
    recorded = [w for w in workloads(definition) if "len_indptr" not in w]
    cases = [inputs]
    if recorded and definition.op_type in ("gemm", "rmsnorm"):
        cases = [inputs_of(definition, MEDIUM, w) for w in (recorded[0], recorded[len(recorded) // 2])]
        cases = [{n: v.to(asked.device) for n, v in made.items()} for made in cases]
    for given in cases:
        if max(v.numel() for v in given.values() if isinstance(v, torch.Tensor)) > 40_000_000:
            pytest.skip(f"{definition.name}: the recorded workload is too large for a CPU run")
        wanted = published(definition, given)
        assert wanted is not None
        got = CALLS[kind_of(definition)](definition, given)
        check_close(got, wanted, list(definition.outputs), asked.tolerance * scale_of(definition))


@needs_definitions
def test_what_is_not_run_says_why() -> None:
    """Of all definitions, those without an op here are counted by reason, and most have one."""
    reasons: dict[str, int] = {}
    for path in FILES:
        reason = why_not(parse(path.read_text(), path.name), SMALL)
        reasons[reason or "run"] = reasons.get(reason or "run", 0) + 1
    for reason, count in sorted(reasons.items(), key=lambda item: -item[1]):
        print(f"{count:4d}  {reason}")
    assert reasons["run"] > len(FILES) // 2
