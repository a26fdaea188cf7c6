"""Triton kernels: ours draw and round as the references do; a user's function becomes a kernel."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from layerzero.backends.triton_kernels import KERNELS
from layerzero.backends.triton_kernels.user_kernel import TritonLaunch, check_launch, triton_kernel
from layerzero.spec.call_spec import CallSpec
from layerzero.spec.capability import Capability
from layerzero.spec.hardware import hypothetical_gpu, probe
from layerzero.spec.kernel import Kernel, rejections
from tests import children, interpreter

# Triton's compiler and its interpreter take a core for as long as they need one.
pytestmark = pytest.mark.timeout(900)
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed"
)


@pytest.mark.parametrize("kernel", KERNELS, ids=[kernel.id for kernel in KERNELS])
def test_what_a_kernel_loads_is_there(kernel: Kernel) -> None:
    """Its module is found and defines its function, also where Triton is not."""
    named = inspect.getclosurevars(kernel.load).nonlocals
    spec = importlib.util.find_spec(f"layerzero.backends.triton_kernels.{named['module']}")
    assert spec is not None and spec.origin is not None, named
    body = ast.parse(Path(spec.origin).read_text()).body
    assert named["name"] in {node.name for node in body if isinstance(node, ast.FunctionDef)}


def printed(code: str, folder: Path, **variables: str) -> Any:
    """The JSON on the last line that a program prints; Triton reads its source, so it stands in a file."""
    program = folder / "program.py"
    program.write_text(code)
    run = children.run(
        f"import runpy; runpy.run_path({str(program)!r}, run_name='__main__')",
        folder=folder,
        variables=os.environ | variables,
        timeout=800.0,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(run.stdout.splitlines()[-1])


REMEMBERED = "from tests import interpreter; interpreter.remember()"


def interpreted(code: str, folder: Path) -> Any:
    """What a program prints under Triton's interpreter."""
    if wrong := interpreter.why_not():
        pytest.skip(wrong)
    return printed(REMEMBERED + code, folder, TRITON_INTERPRET="1")


DRAWN = """
import json, torch
from layerzero.backends.triton_kernels.sampling import sample
from layerzero.ops.sampling.draw import greedy_tokens
from layerzero.ops.sampling.sampling import sample_reference
logits = torch.randn(3, 11, generator=torch.Generator().manual_seed(0)) * 2
logits[1, 3:7] = 1.5
logits[2, ::2] = -torch.inf
rows = torch.tensor([5, 10**15, -3])
calls = [
    (1.0, 0, 1.0, 7, 0),
    (0.7, 4, 1.0, rows, 1),
    (torch.tensor([0.0, 0.5, 2.0]), torch.tensor([0, 5, 3]), torch.tensor([1.0, 0.6, 0.0]), rows, rows),
]
found = [[sample(logits, *c).tolist(), sample_reference(logits, *c).tolist()] for c in calls]
near = (logits[:, :5] / 1000 - 0.25).half()  # keys of fewer bits: neighbours in float16, below zero
found += [[sample(near, *c).tolist(), sample_reference(near, *c).tolist()] for c in calls]
wide = torch.randn(7, 20000, generator=torch.Generator().manual_seed(1)).bfloat16()  # three parts, with ties
wide[1, 15], wide[2, 9000], wide[3] = torch.nan, torch.inf, -torch.inf
wide[4, 5:] = -torch.inf
wide[5, 8191] = wide[5, 8192] = wide[5, 19999] = 9.0
for table in (logits, near, wide, wide[:, 3:]):  # greedy, in parts, whatever the filters
    found += [[sample(table, *(0.0, k, p, 7, 0)).tolist(), greedy_tokens(table).tolist()]
              for k, p in ((0, 1.0), (4, 0.5))]
assert found[-4][0][1:4] == [-1, -1, -1] and found[-4][0][5] == 8191, found[-4]
print(json.dumps(found))
"""


@needs_triton
def test_rows_are_drawn_as_the_reference_draws_them(tmp_path: Path) -> None:
    """Plain, top-k, and every argument by row: the same tokens, ties and hidden tokens included."""
    for ours, right in interpreted(DRAWN, tmp_path):
        assert ours == right


PROPOSED = """
import json, torch
from layerzero.backends.triton_kernels.sampling import sample_with_proposals
from layerzero.ops.sampling.sampling import sample_reference
logits = torch.randn(4, 11, generator=torch.Generator().manual_seed(0)) * 2
logits[1, 3:7] = 1.5
logits[2, ::2] = -0.0
logits[2, 1::2] = 0.0
logits[3, 5:] = -torch.inf
def keeping(count):
    edge = logits.sort(-1, descending=True).values[:, count - 1 : count]
    return torch.where(logits >= edge, logits, -torch.inf)
found = []
for count, share in ((4, 1.0), (0, 0.6), (5, 0.7)):
    for told in (1, 2, 4, 8, 11):  # how many a filter says are kept, right or wrong
        mask = None if count == 0 else keeping(told)
        kept = None if share == 1.0 else keeping(told).softmax(-1)
        call = (logits, 0.8, count, share, torch.arange(4), 3)
        found.append([sample_with_proposals(*call, mask, kept).tolist(), sample_reference(*call).tolist()])
print(json.dumps(found))
"""


@needs_triton
def test_what_a_filter_proposes_is_proved(tmp_path: Path) -> None:
    """Whatever another filter says is kept, the token is the reference's, ties and zeros included."""
    found = interpreted(PROPOSED, tmp_path)
    assert len(found) == 15
    for ours, right in found:
        assert ours == right


VERIFIED = """
import json, torch
from layerzero.backends.triton_kernels.verify import verify_chain
from layerzero.ops.sampling.verify import verify_chain_reference
source = torch.Generator().manual_seed(3)
draft = torch.rand(4, 2, 11, generator=source).softmax(-1)
target = torch.rand(4, 3, 11, generator=source).softmax(-1)
target[1, :2] = draft[1]
target[2, 0] = 0.0
target[2, 0, 5] = 1.0
target[3] = 0.0
tokens = torch.randint(0, 11, (4, 2), generator=source)
target[0, 0], target[0, 1] = draft[0, 0], 0.0
target[0, 1, (tokens[0, 1] + 1) % 11] = 1.0
rows = torch.tensor([5, 10**15, -3, 0])
found = []
for seed, offset in ((7, 0), (8, 1), (9, 2), (rows, 2**40), (rows, rows)):
    for call in ((draft, tokens, target), (draft[:, :0], tokens[:, :0], target[:, :1].contiguous())):
        pair = [f(*call, seed, offset) for f in (verify_chain, verify_chain_reference)]
        found.append([[part.tolist() for part in outs] for outs in pair])
print(json.dumps(found))
"""


@needs_triton
def test_chains_are_verified_as_the_reference_verifies_them(tmp_path: Path) -> None:
    """Tokens that stay and the one drawn: equal distributions, certain ones, none at all, no place at all."""
    accepted = set()
    for ours, right in interpreted(VERIFIED, tmp_path):
        assert ours == right
        accepted |= set(right[1])
    assert accepted == {0, 1, 2}


OWN = """
import json, torch, triton
import triton.language as tl
import layerzero as lz
from layerzero.backends.triton_kernels.user_kernel import TritonLaunch, triton_kernel
from layerzero.spec.capability import (Capability)
from layerzero.spec.kernel import (Efficiency)

@triton.jit
def norm(x_ptr, out_ptr, width, eps, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + tl.program_id(0) * width + at, mask=at < width, other=0.0)
    out = x / tl.sqrt(tl.sum(x * x, 0) / width + eps)
    tl.store(out_ptr + tl.program_id(0) * width + at, out, mask=at < width)

broken = False
def prepare(x, weight, eps):
    out = torch.empty_like(x)
    width = x.shape[-1]
    block = width if broken else triton.next_power_of_2(width)
    return TritonLaunch((x.numel() // width,), (x, out, width, eps), {"BLOCK": block}, out)

capability = Capability(
    source="mine", platforms=frozenset({"cpu"}), dtypes=frozenset({"float32"}),
    features=frozenset({"no_weight"}), contiguous=True, gradient=False,
)
kernel = triton_kernel(
    "acme.rms_norm.triton", "rms_norm", norm, prepare, capability,
    efficiency=Efficiency(1.0, 1.0, 0.1, "a test: as fast as can be"),
)
x = torch.randn(4, 31)
found = []
with lz.start(lz.Settings(device="cpu"), scoped=True) as rt:
    rt.add_kernel(kernel)
    for broken in (False, True):
        rows = x[:3] if broken else x
        out = lz.sync.rms_norm(rows)
        right = torch.nn.functional.rms_norm(rows, (31,), eps=1e-6)
        found.append([lz.last_selection().kernel, float((out - right).abs().max())])
    found.append(str(lz.explain("rms_norm", x.double())))
print(json.dumps(found))
"""


@needs_triton
def test_a_users_function_is_chosen_runs_and_is_replaced_when_its_launch_is_wrong(
    tmp_path: Path,
) -> None:
    """Registered, it wins by its price; a block that is no power of two fails, and another kernel answers."""
    first, second, told = interpreted(OWN, tmp_path)
    assert first[0] == "acme.rms_norm.triton" and first[1] < 1e-5
    assert second[0] != "acme.rms_norm.triton" and second[1] < 1e-5
    assert "acme.rms_norm.triton" in told and "DTYPE_UNSUPPORTED" in told


def launch(**changes: Any) -> TritonLaunch:
    """A launch that is right but for the changes."""
    out = torch.empty(3)
    plain: dict[str, Any] = {"grid": (3,), "arguments": (out,), "constants": {"BLOCK": 64}, "result": out}
    return TritonLaunch(**(plain | changes))


@needs_triton
def test_a_wrong_launch_does_not_reach_the_function() -> None:
    """What `prepare` returns is looked at first, at every new shape of a launch; a right one is launched."""
    launched: list[tuple[int, ...]] = []

    class Function:
        def run(self) -> None: ...

        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            launched.append(grid)
            return lambda *_, **__: None

    grids = iter([(3,), (0,), (3,)])
    kernel = triton_kernel(
        "acme.rms_norm.looked_at", "rms_norm", Function(), lambda *_: launch(grid=next(grids)),
        Capability(source="a test"),
    )  # fmt: skip
    run = kernel.load()
    run()
    with pytest.raises(ValueError, match=r"grid\[0\] needs an int"):
        run()
    run()
    assert launched == [(3,), (3,)]


@pytest.mark.parametrize(
    ("wrong", "error", "words"),
    [
        (3, TypeError, "prepare needs to return a TritonLaunch, got int"),
        (launch(grid=()), ValueError, "grid needs a tuple of 1 to 3 numbers"),
        (launch(grid=(1, 1, 1, 1)), ValueError, "grid needs a tuple of 1 to 3 numbers"),
        (launch(grid=(0,)), ValueError, r"grid\[0\] needs an int in \[1, 2147483647\], got 0"),
        (launch(grid=(2**31,)), ValueError, r"grid\[0\] needs an int in"),
        (launch(grid=(1, 65536)), ValueError, r"grid\[1\] needs an int in \[1, 65535\], got 65536"),
        (launch(grid=(1, 1, 65536)), ValueError, r"grid\[2\] needs an int in \[1, 65535\]"),
        (launch(grid=(1.5,)), TypeError, r"grid\[0\] needs an int, got float"),
        (launch(constants={"BLOCK_M": 48}), ValueError, "BLOCK_M needs a power of two"),
        (launch(constants={"BLOCK": 2**21}), ValueError, r"BLOCK needs a power of two in \[1, 1048576\]"),
        (launch(constants={"num_warps": 64}), ValueError, r"num_warps needs a power of two in \[1, 32\]"),
        (launch(result=None), TypeError, "result needs a tensor"),
        (launch(result=()), TypeError, "result needs a tensor"),
    ],
)
def test_a_launch_that_cannot_be_is_named(wrong: Any, error: type[Exception], words: str) -> None:
    """Grid and block limits are checked before Triton sees the launch."""
    check_launch(launch(grid=(2**31 - 1, 65535, 65535), constants={"BLOCK": 1 << 20, "num_warps": 32}))
    with pytest.raises(error, match=words):
        check_launch(wrong)


def test_what_is_no_triton_function_is_refused() -> None:
    """A plain function, and a name that belongs to somebody else."""
    capability = Capability(source="mine")
    with pytest.raises(TypeError, match=r"decorated with triton\.jit, got function"):
        triton_kernel("acme.rms_norm", "rms_norm", launch, launch, capability)
    with pytest.raises(TypeError, match="prepare needs a function"):
        triton_kernel("acme.rms_norm", "rms_norm", launch, None, capability)  # type: ignore[arg-type]


DECODED = """
import json, torch
from layerzero.backends.triton_kernels import paged
from layerzero.ops.paged.attention import paged_attention_reference
paged._processors = lambda device: 48  # sequences are cut into parts
found = []
for heads, key_heads, layout, page in ((4, 4, "NHD", 16), (8, 2, "NHD", 4), (6, 1, "HND", 16)):
    generator = torch.Generator().manual_seed(heads)
    shape = (80, page, key_heads, 64) if layout == "NHD" else (80, key_heads, page, 64)
    k, v = (torch.randn(shape, generator=generator).half() for _ in range(2))
    rows = torch.randn(4, heads + 2, 64, generator=generator).half()
    q = rows[:, 1:-1]  # a piece of a projection
    tables = torch.randperm(80, generator=generator).view(4, 20).int()
    k[tables[0, -1]] = v[tables[0, -1]] = float("nan")  # behind the first sequence's end
    lens = torch.tensor([1, 20 * page, 3 * page + 1, 0], dtype=torch.int32)
    parts = paged.parts_of(4 * key_heads, 20 * page, 48)
    for scale in (None, -0.3):
        call = (q, k, v, tables, lens, None, True, scale, None, None, layout, False, None, None)
        ours, right = paged.paged_attention(*call), paged_attention_reference(*call)
        found.append((parts, float((ours.float() - right.float()).abs().max())))
print(json.dumps(found))
"""


@needs_triton
def test_pages_decode_as_the_reference(tmp_path: Path) -> None:
    """Groups of heads, both layouts, pages of several sizes, strided queries, whole and cut sequences of
    lengths from none on; what stands behind an end is not read."""
    found = interpreted(DECODED, tmp_path)
    assert {parts for parts, _ in found} == {1, 2} and max(error for _, error in found) < 4e-3, found


ATTENDED = """
import json, torch
from layerzero.backends.triton_kernels import paged_rows
from layerzero.ops.paged.attention import paged_attention_reference
found = []
counts, lens = [1, 5, 70, 0, 9, 1], torch.tensor([7, 5, 81, 3, 2, 40], dtype=torch.int32)
starts = torch.tensor([0, 1, 6, 76, 76, 85, 86], dtype=torch.int32)
for heads, key_heads, layout, codes in (
    (4, 4, "NHD", None), (6, 2, "HND", None), (4, 1, "NHD", "token"), (4, 2, "HND", "head"),
    (2, 2, "NHD", "tensor"),
):
    generator = torch.Generator().manual_seed(heads)
    shape = (48, 12, key_heads, 64) if layout == "NHD" else (48, key_heads, 12, 64)
    k, v = (torch.randn(shape, generator=generator).half() for _ in range(2))
    scales = (None, None)
    if codes:
        k, v = (pool.mul(20).round().to(torch.int8) for pool in (k, v))
        size = {"token": shape[:-1], "head": (key_heads,), "tensor": ()}[codes]
        scales = tuple(torch.rand(size, generator=generator) / 20 + 0.02 for _ in range(2))
    rows = torch.randn(86, heads + 2, 64, generator=generator).half()
    q = rows[:, 1:-1]  # a piece of a projection
    tables = torch.randperm(48, generator=generator).view(6, 8).int()
    if not codes:
        k[tables[1, 1:]] = v[tables[1, 1:]] = float("nan")  # behind the second sequence's end
    for causal, scale in ((True, None), (False, -0.3)):
        call = (q, k, v, tables, lens, starts, causal, scale, None, None, layout, False, *scales)
        ours, right = paged_rows.paged_attention(*call), paged_attention_reference(*call)
        found.append(float((ours.float() - right.float()).abs().max()))
    alone = paged_rows.paged_attention(
        q[6:76], k, v, tables[2:3], lens[2:3], torch.tensor([0, 70], dtype=torch.int32), *call[6:]
    )
    found.append(float(not torch.equal(alone, ours[6:76])))
one = (q[:6], k, v, tables, lens, None, True, None, None, None, layout, False, *scales)
ours, right = paged_rows.paged_attention(*one), paged_attention_reference(*one)
found.append(float((ours.float() - right.float()).abs().max()))
print(json.dumps(found))
"""


@needs_triton
def test_prompts_and_decoding_attend_together_as_the_reference(tmp_path: Path) -> None:
    """One launch for prompts, pieces behind other tokens, single tokens, none, and more queries than keys;
    groups of heads, both layouts, codes with every kind of scale; a sequence has the same bits alone."""
    found = interpreted(ATTENDED, tmp_path)
    assert max(found) < 1e-2, found


AHEAD = """
import json, triton
import triton.language as tl
from layerzero.backends.triton_kernels.user_kernel import compile_ahead
from layerzero.spec.errors import BackendNotAvailableError

@triton.jit
def copy(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out_ptr + at, tl.load(x_ptr + at, mask=at < n), mask=at < n)

types = {"x_ptr": "*fp32", "out_ptr": "*fp32", "n": "i32"}
found = [compile_ahead(copy, types, {"BLOCK": 128}, sm=sm) for sm in (80, 90)]
try:
    compile_ahead(copy, types, {"BLOCK": 100}, sm=90)
except BackendNotAvailableError as error:
    found += [error.context["reason"], str(error)]
print(json.dumps(found))
"""


@needs_triton
def test_a_function_compiles_for_hardware_that_is_not_here(tmp_path: Path) -> None:
    """Machine code for 8.0 and 9.0 without a GPU; what does not compile says JIT_FAILED and why."""
    ampere, hopper, reason, message = printed(AHEAD, tmp_path)
    assert ampere > 1000 and hopper > 1000
    assert reason == "JIT_FAILED" and "copy does not compile for sm 90" in message


def test_our_kernels_are_for_gpus_with_the_numbers_they_need() -> None:
    """Float8 codes need 8.9; the CPU and a Turing card are refused with their reasons."""
    by_op = {kernel.op: kernel for kernel in KERNELS}
    request = CallSpec(op="quantize", platform="cuda", dtype="bfloat16", dtypes=("bfloat16",), dims={"C": 64})
    reasons = [
        [r.reason.value for r in rejections(by_op["quantize"], request, hypothetical_gpu(sm))]
        for sm in (86, 90)
    ]
    assert reasons == [["SM_TOO_OLD"], []]
    assert [r.reason.value for r in rejections(by_op["sample"], request, probe("cpu"))] == [
        "PLATFORM_MISMATCH"
    ]
