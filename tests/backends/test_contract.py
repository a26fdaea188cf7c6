"""Every kernel that runs here does what it claims: numbers, structure, inputs, gradients, repetition."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from layerzero.ops import checks, table
from layerzero.ops.op import Args
from layerzero.spec import tolerances
from layerzero.spec.capability_overlays import export
from layerzero.spec.kernel import Kernel, rejections
from tests.backends import cases

IDS = [k.id for k in cases.RUNNABLE]
# What the capability document says of each kernel is what it is held to.
BOUNDS = {name: entry.error_factor for name, entry in export(cases.KERNELS).kernels.items()}
# All tests of one kernel follow each other, so that they share its first results.
every_kernel = pytest.mark.parametrize("kernel", cases.RUNNABLE, ids=IDS, scope="module")
# Their second output is that of torch's flash kernel.
FLASH_LSE = {"torch.attention.sdpa_flash_cpu", "torch.attention.by_sequence"}
# On a device the order in which threads meet differs from run to run.
AGAIN = 1 if cases.DEVICE == "cpu" else 3
# Some calls show what is read before it is written; Triton's interpreter runs programs slowly and one by one.
EVERY = 8 if cases.INTERPRETED else 1


# Calls whose ids lie apart: of pages and sequences with several queries, too.
STRIDED = 4 if cases.INTERPRETED else 6
# What is rounded to eight bits is a sum first, in any order: a code may be its neighbour.
ROUNDS_SUMS = frozenset({"add_rms_norm_quantize"})


def _codes_apart(codes: Tensor, right: Tensor) -> int:
    """How many steps of a format two tensors of codes differ at most; tokens are equal or not."""
    if codes.dtype != torch.int8 or not codes.numel():
        return int(not torch.equal(codes, right))
    bits = [t.cpu().short() for t in (codes, right)]
    return int((bits[0] - bits[1]).abs().max())


@functools.cache
def loaded(kernel: Kernel) -> Any:
    return kernel.load()


class Ran(NamedTuple):
    """A call, what the kernel gave for it, and the operands that it left changed, by position."""

    case: cases.Case
    args: Args
    outs: tuple[Tensor, ...]
    changed: list[int]


class Runs:
    """What a kernel gave for its generated calls, each made once, when somebody first asks for it."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel, self._calls = kernel, calls(kernel)
        self._made: list[Ran] = []

    def __iter__(self) -> Iterator[Ran]:
        yield from self._made
        for case, args in self._calls:
            try:
                self._made.append(_run(self._kernel, case, args))
            except Exception:
                self._calls = itertools.chain([(case, args)], self._calls)  # whoever asks next fails, too
                raise
            yield self._made[-1]


def _run(kernel: Kernel, case: cases.Case, args: Args) -> Ran:
    before = [a.clone() if isinstance(a, Tensor) else a for a in args]
    with torch.no_grad():
        outs = cases.results(table.get(kernel.op), loaded(kernel), args)
    pairs = enumerate(zip(args, before, strict=True))
    changed = [at for at, (a, b) in pairs if isinstance(a, Tensor) and not torch.equal(a, b)]
    return Ran(case, args, outs, changed)


@functools.lru_cache(maxsize=1)
def ran(kernel: Kernel) -> Runs:
    """The generated calls that the kernel's capability lets through, in every dtype it claims.

    An operand that the op says it writes is a copy, and is among the results.
    """
    return Runs(kernel)


def calls(kernel: Kernel, every: bool = cases.DEVICE != "cpu") -> Iterator[tuple[cases.Case, Args]]:
    """The generated calls that the kernel's capability lets through, in every dtype it claims.

    Pairs of features are asked in one dtype in turn, and in `every` one on a device.
    """
    op, dtypes, usual = table.get(kernel.op), cases.dtypes(kernel), {"bshd", *cases.needed(kernel)}
    for place, dtype in enumerate(dtypes):
        for number, case in enumerate(cases.cases_of(kernel)):
            if not every and len({*case.asks} - usual) > 1 and number % len(dtypes) != place:
                continue
            args = cases.call(case, dtype)
            if not rejections(kernel, op.check(args), cases.HERE):
                yield case, args


@pytest.mark.parametrize("kernel", cases.KERNELS, ids=[k.id for k in cases.KERNELS])
def test_a_kernel_runs_here_or_says_why_not(kernel: Kernel) -> None:
    """Kernels for other hardware are named with what they miss."""
    missing = cases.why_not_here(kernel)
    if missing:
        pytest.skip(missing)
    assert callable(loaded(kernel))


def _has_coarse_exponentials(dtype: torch.dtype) -> bool:
    """Whether torch's flash kernel takes fast exponentials for `dtype`: with AVX2, for 16 bits."""
    return cases.DEVICE == "cpu" and dtype.itemsize == 2 and torch.backends.cpu.get_cpu_capability() == "AVX2"


@functools.cache
def _flash_lse_error(dtype: torch.dtype) -> float:
    """How far the log-sum-exp of torch's flash kernel is off where it is called by itself."""
    generator, errors = torch.Generator().manual_seed(0), []
    for tokens in (1, 7, 33, 128):
        q, k, v = (torch.randn(2, 4, tokens, 16, generator=generator).to(dtype) for _ in range(3))
        _, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v)
        truth = (q.double() @ k.double().transpose(-1, -2) * 16**-0.5).logsumexp(-1)
        errors.append(float((lse.double() - truth).abs().max()))
    return max(errors)


@every_kernel
def test_results_are_within_tolerance(kernel: Kernel) -> None:
    """Each claimed feature in each dtype and size, and each pair of features, agrees with the truth."""
    made = list(ran(kernel))
    assert len(made) >= 2
    wrong = _wrong(kernel, made)
    assert not wrong, "\n".join(wrong[:20])


@pytest.mark.slow
@every_kernel
def test_pairs_of_features_are_within_tolerance_in_every_dtype(kernel: Kernel) -> None:
    """Not only in one of them in turn."""
    wrong = _wrong(kernel, (_run(kernel, *call) for call in calls(kernel, every=True)))
    assert not wrong, "\n".join(wrong[:20])


def _wrong(kernel: Kernel, made: Iterable[Ran]) -> list[str]:
    """What is wrong with a kernel's answers, in words."""
    op, wrong = table.get(kernel.op), list[str]()
    for case, args, outs, _ in made:
        with torch.no_grad():
            truths, bases = cases.expected(case, args)
        got = [(tuple(o.shape), checks.dtype_name(o.dtype)) for o in outs]
        wanted = [(s.shape, s.dtype) for s in op.outputs(args)]
        assert got[: len(wanted)] == wanted
        for index, out in enumerate(outs):
            if not out.is_floating_point() or out.itemsize == 1:
                whole = torch.int8 if out.itemsize == 1 else out.dtype
                right = cases.results(op, op.reference, args)[index]
                if _codes_apart(out.view(whole), right.view(whole)) > (kernel.op in ROUNDS_SUMS):
                    wrong.append(f"{case} {out.dtype}: other codes")
                continue
            base = bases[index].to(out.dtype)
            softcap = "softcap" in case.asks
            if index == 1 and kernel.id in FLASH_LSE and _has_coarse_exponentials(args[0].dtype):
                allowed = tolerances.FACTOR * _flash_lse_error(args[0].dtype)
                if torch.allclose(out.double(), truths[index].double(), rtol=0.0, atol=allowed):
                    continue
            for problem in tolerances.mismatches(
                out.cpu(), truths[index], base, softcap=softcap, factor=BOUNDS[kernel.id]
            ):
                wrong.append(f"{case} {args[0].dtype} output {index}: {problem}")
    return wrong


@every_kernel
def test_ids_may_be_strided(kernel: Kernel) -> None:
    """Positions, places, tables and lengths that are every other element of a tensor are read as such.

    On a device nothing copies them first.
    """
    op, compared = table.get(kernel.op), 0
    for case, args, outs, _ in ran(kernel):
        whole = [isinstance(a, Tensor) and a.dtype in (torch.int32, torch.int64) for a in args]
        pairs = zip(args, whole, strict=True)
        apart = tuple(torch.stack([a, a.flip(0)], -1)[..., 0] if is_id else a for a, is_id in pairs)
        if not any(whole) or rejections(kernel, op.check(apart), cases.HERE):
            continue
        with torch.no_grad():
            again = cases.results(op, loaded(kernel), apart)
        for out, wanted in zip(again, outs, strict=True):
            bits = (t.clone(memory_format=torch.contiguous_format).view(-1) for t in (out, wanted))
            assert torch.equal(*(t.view(torch.uint8) for t in bits)), case
        compared += 1
        if compared == STRIDED:
            return
    if not compared:
        pytest.skip("no call of it has ids that may lie apart")


@pytest.mark.parametrize("name", sorted(BOUNDS))
def test_a_kernel_is_held_to_the_bound_of_its_document(name: str) -> None:
    """A little less than so many times torch's own error passes, a little more does not; no bound is zero."""
    truth = torch.randn(64, 64, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    off = torch.randn(64, 64, generator=torch.Generator().manual_seed(1), dtype=torch.float64) / 10
    base, bound = (truth + off).float(), BOUNDS[name]
    assert 1.0 <= bound <= tolerances.FACTOR
    good, bad = ((truth + off * bound * share).float() for share in (0.95, 1.05))
    assert tolerances.mismatches(good, truth, base, factor=bound) == []
    assert tolerances.mismatches(bad, truth, base, factor=bound)


@every_kernel
def test_every_claimed_feature_is_exercised(kernel: Kernel) -> None:
    """No claim goes untested: the generated calls ask for each feature that the op's kernels can have."""
    op = table.get(kernel.op)
    asked: set[str] = set()
    for call in ran(kernel):
        asked |= op.check(call.args).features
    by_hand = {"dropout", "mask_grad", "lse_grad", "sinks_grad"}  # tested below and in test_torch_sdpa.py
    switches = {name for name in kernel.capability.features if name.startswith("sdpa_no_")}  # torch's own
    claimed = kernel.capability.features - by_hand - switches
    if kernel.backend == "reference":
        return
    assert claimed <= asked, claimed - asked


@every_kernel
def test_inputs_stay_as_they_were(kernel: Kernel) -> None:
    """No kernel writes what the caller gave it, but for the operands that its op says it writes."""
    assert not [f"{call.case}: {call.changed}" for call in ran(kernel) if call.changed]


@every_kernel
def test_repeated_runs_give_the_same_bits(kernel: Kernel) -> None:
    """A kernel that claims to be deterministic is, bitwise."""
    if cases.DEVICE != "cpu" and not kernel.capability.deterministic:
        pytest.skip("makes no such promise")
    assert kernel.capability.deterministic, "no kernel of the CPU is otherwise"
    op = table.get(kernel.op)
    for case, args, first, _ in list(ran(kernel))[::EVERY]:
        for _ in range(AGAIN):
            with torch.no_grad():
                again = cases.results(op, loaded(kernel), args)
            assert all(_same_bits(a, b) for a, b in zip(first, again, strict=True)), str(case)


def _same_bits(a: Tensor, b: Tensor) -> bool:
    """torch compares no scales of float8_e8m0fnu."""
    return torch.equal(
        *(t.view(torch.int8) if t.itemsize == 1 and t.is_floating_point() else t for t in (a, b))
    )


def _weighed(out: Tensor) -> Tensor:
    """A sum in which no two elements count alike: a plain sum of normed rows has no gradient."""
    weights = torch.arange(out.numel(), dtype=torch.float64, device=out.device).cos()
    return (out * weights.view(out.shape).to(out.dtype)).sum()


def _learning(args: Args, learned: tuple[int, ...]) -> Args:
    """The arguments with the floating ones at `learned` as leaves that want a gradient."""
    return tuple(
        a.detach().requires_grad_() if i in learned and isinstance(a, Tensor) and a.is_floating_point() else a
        for i, a in enumerate(args)
    )


def _gradients(run: Any, args: Args, learned: tuple[int, ...]) -> list[Tensor]:
    """The gradients of a call's floating operands, on the CPU."""
    own = _learning(args, learned)
    outs = [o for o in cases.as_tuple(run(*own)) if o.requires_grad]
    leaves = [a for a in own if isinstance(a, Tensor) and a.requires_grad]
    found = torch.autograd.grad([_weighed(o) for o in outs], leaves)
    return [g.cpu() for g in found]


@functools.cache  # kernels of one op are asked the same calls
def _true_gradients(case: cases.Case, learned: tuple[int, ...]) -> list[Tensor]:
    return _gradients(table.get(case.op).reference, cases.call(case, torch.float64), learned)


def _compare_gradients(kernel: Kernel) -> None:
    op, wrong, compared = table.get(kernel.op), [], 0
    learned = op.operands if kernel.op != "cross_entropy" else (0,)
    for dtype in cases.dtypes(kernel):
        for case in cases.cases(kernel.op, cases.base_of(kernel)):
            args = cases.call(case, dtype)
            request = op.check(_learning(args, learned)).replace(modes=frozenset({"grad"}))
            if rejections(kernel, request, cases.HERE):
                continue
            here = cases.to("cpu", args)
            truths = _gradients(op.reference, cases.widened(here), learned)
            bases = _gradients(lambda *own: cases.baseline(op, own), here, learned)
            for index, mine in enumerate(_gradients(loaded(kernel), args, learned)):
                compared += 1
                base = bases[index].to(mine.dtype)
                found = tolerances.mismatches(mine, truths[index], base)
                wrong += [f"{case} {dtype} gradient {index}: {text}" for text in found]
    assert compared
    assert not wrong, "\n".join(wrong[:20])


@every_kernel
def test_gradients_equal_the_references(kernel: Kernel) -> None:
    """Where a gradient is promised, every floating operand gets the float64 reference's.

    Kernels without float64 are compared in their own dtypes, with plain torch's error in that dtype.
    """
    op = table.get(kernel.op)
    if not kernel.capability.gradient or not op.differentiable:
        pytest.skip("promises no gradient")
    if "float64" not in kernel.capability.dtypes:
        _compare_gradients(kernel)
        return
    compared = 0
    learned = op.operands if kernel.op != "cross_entropy" else (0,)  # class weights are constants
    for case in cases.cases(kernel.op):
        args = tuple(
            a.requires_grad_() if isinstance(a, Tensor) and a.is_floating_point() and i in learned else a
            for i, a in enumerate(cases.call(case, torch.float64))
        )
        request = op.check(args)
        if rejections(kernel, request.replace(modes=frozenset({"grad"})), cases.HERE):
            continue
        leaves = [a for a in args if isinstance(a, Tensor) and a.requires_grad]
        outs = [o for o in cases.as_tuple(loaded(kernel)(*args)) if o.requires_grad]
        ours = torch.autograd.grad([_weighed(o) for o in outs], leaves)
        for mine, true in zip(ours, _true_gradients(case, learned), strict=True):
            torch.testing.assert_close(mine, true)
        compared += len(leaves)
    assert compared or kernel.op == "alibi" or "float64" not in kernel.capability.dtypes
