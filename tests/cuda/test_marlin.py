"""vLLM's Marlin and Machete on a card: every format that they take, 1 to 8,192 rows; skipped elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import layerzero as lz
from layerzero.formats import QuantizedTensor
from layerzero.ops.quantize.quantized_linear import quantized_linear_reference
from layerzero.spec.hardware import probe
from tests.backends import cases
from tests.backends.test_vllm_products import BOUND, BY_ID, WEIGHTS, args_of, takers

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
TAKEN = [(name, case) for case in WEIGHTS for name in sorted(case[2])]
by_case = pytest.mark.parametrize(
    ("name", "case"), TAKEN, ids=[f"{name}-{case[0]}-{case[1]}" for name, case in TAKEN]
)
ROWS = (1, 2, 3, 7, 8, 15, 16, 17, 33, 64, 100, 128, 256, 257, 512, 1000, 2048, 4096, 8192)
SHAPES = ((256, 1280), (1536, 2048))  # columns, K


@pytest.fixture(autouse=True, scope="module")
def runtime() -> Iterator[lz.Runtime]:
    """A runtime that loads nothing behind calls."""
    with lz.start(lz.Settings.load(warm="off", device="cuda", perfdb=None)) as opened:
        yield opened


def loaded(name: str) -> Callable[..., Tensor]:
    """The kernel, where vllm is installed and the card is one of its own."""
    if missing := cases.why_not_here(BY_ID[name], probe("cuda:0")):
        pytest.skip(missing)
    product: Callable[..., Tensor] = BY_ID[name].load()
    return product


def weight_of(form: str, how: dict[str, Any], columns: int, inner: int) -> QuantizedTensor:
    generator = torch.Generator("cuda").manual_seed(3)
    numbers = torch.randn(columns, inner, generator=generator, device="cuda") * inner**-0.5
    return QuantizedTensor.quantize(numbers, form, **how)


def error_of(out: Tensor, args: tuple[Any, ...]) -> float:
    """The largest error over the largest output, against float64 of the weight's numbers."""
    x, weight, scale, bias, inputs, *others = args
    shift = None if bias is None else bias.double()
    truth = quantized_linear_reference(x.double(), weight, scale, shift, inputs, *others)
    return float((out.double() - truth).abs().max() / truth.abs().max())


@by_case
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products_are_those_of_the_dequantized_weight(name: str, case: Any, dtype: torch.dtype) -> None:
    """A bias, rows out of a wider tensor; every row count."""
    product = loaded(name)
    for columns, inner in SHAPES:
        weight = weight_of(case[0], case[1], columns, inner)
        bias = torch.randn(columns, device="cuda").to(dtype)
        for count in ROWS:
            x = torch.randn(count, inner + 8, device="cuda").to(dtype)[:, :inner]
            args = args_of(x, weight, bias)
            if name not in takers(args):
                continue
            error = error_of(product(*args), args)
            assert error < BOUND[dtype], (columns, inner, count, error)


@by_case
def test_replayed_graphs_give_what_calls_give(name: str, case: Any) -> None:
    """Over new rows, after other products, and where the graph laid the weight out itself."""
    product, other = loaded(name), weight_of(case[0], case[1], 512, 1280)
    for is_ready in (True, False):
        weight = weight_of(case[0], case[1], 256, 1280)
        x = torch.randn(5, 1280, device="cuda").bfloat16()
        args = args_of(x, weight)
        product(*args_of(x, other))
        if is_ready:
            product(*args)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = product(*args)
        for _ in range(3):
            x.copy_(torch.randn(5, 1280, device="cuda"))
            product(*args_of(x, other))
            graph.replay()
            torch.cuda.synchronize()
            assert error_of(out, args) < BOUND[torch.bfloat16]


@by_case
def test_streams_at_once_give_what_one_gives(name: str, case: Any) -> None:
    """One weight on two streams: they share nothing that is written."""
    product, weight = loaded(name), weight_of(case[0], case[1], 256, 1280)
    calls = [args_of(torch.randn(n, 1280, device="cuda").bfloat16(), weight) for n in (1, 16, 300) * 8]
    wanted = [product(*args) for args in calls]
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    torch.cuda.synchronize()
    outs = []
    for at, args in enumerate(calls):
        with torch.cuda.stream(streams[at % 2]):
            outs.append(product(*args))
    torch.cuda.synchronize()
    for out, right in zip(outs, wanted, strict=True):
        assert float((out - right).abs().max()) <= 1e-2 * float(right.abs().max())


def test_a_call_is_answered_by_the_backend_that_it_names() -> None:
    """Through the public op."""
    loaded("vllm_marlin.quantized_linear.integers")
    weight = weight_of("int4", {"group_size": 128}, 256, 1280)
    x = torch.randn(4, 1280, device="cuda").bfloat16()
    backends = {name.split(".")[0] for name in takers(args_of(x, weight))}
    for backend in sorted(backends):
        out = lz.sync.quantized_linear(x, backend=backend, **weight.arguments())
        assert error_of(out, args_of(x, weight)) < BOUND[torch.bfloat16]
        assert (lz.last_selection() or pytest.fail("nothing was selected")).kernel.startswith(backend)
