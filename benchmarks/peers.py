"""What an attention call costs through every peer that installs on a CPU, beside ours and torch itself.

`pip install layerzero-runtime[bench]` brings the peers. flashinfer-bench asks for CUDA wheels of its own:
`pip install --no-deps flashinfer-bench docstring_parser` leaves torch alone. A peer that is missing, or that
cannot run here, stays in the table with its reason.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from harness import Call, Plan, interleave, over, us
from torch import Tensor
from torch.nn import functional

import layerzero as lz

Opened = Callable[[ExitStack, Tensor, Tensor, Tensor], Call]


def transformers_interface(stack: ExitStack, q: Tensor, k: Tensor, v: Tensor) -> Call:
    """What a transformers layer does: look its attention up by name, call it."""
    import torch
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    module = torch.nn.Module()
    module.is_causal = False  # type: ignore[assignment]
    return lambda: ALL_ATTENTION_FUNCTIONS.get_interface("sdpa", None)(
        module, q, k, v, None, dropout=0.0, scaling=None
    )


def hf_kernels(stack: ExitStack, q: Tensor, k: Tensor, v: Tensor) -> Call:
    """A layer that `kernelize` has visited, without a mapping for the CPU: its own forward stays."""
    import torch
    from kernels import Mode, kernelize, use_kernel_forward_from_hub

    @use_kernel_forward_from_hub("BenchAttention")
    class Attention(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return functional.scaled_dot_product_attention(q, k, v)

    layer = kernelize(Attention(), mode=Mode.INFERENCE, device="cpu", use_fallback=True)
    return lambda: layer(q, k, v)


def diffusers_dispatch(stack: ExitStack, q: Tensor, k: Tensor, v: Tensor) -> Call:
    """`dispatch_attention_fn`, which takes tokens before heads."""
    from diffusers.models.attention_dispatch import dispatch_attention_fn

    # The same memory, seen in its axis order: it transposes back before it calls torch.
    a, b, c = (t.transpose(1, 2) for t in (q, k, v))
    return lambda: dispatch_attention_fn(a, b, c)


def flashinfer_bench_apply(stack: ExitStack, q: Tensor, k: Tensor, v: Tensor) -> Call:
    """`apply` with one definition, one Python solution and one trace: a hit in its table."""
    from flashinfer_bench import ApplyConfig, TraceSet, apply
    from flashinfer_bench.apply.runtime import ApplyRuntime

    folder = stack.enter_context(tempfile.TemporaryDirectory())
    traces: Any = TraceSet(root=folder, **_flashinfer_traces(q))
    runtime = ApplyRuntime(traces, ApplyConfig())
    stack.enter_context(runtime)

    def fallback(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        raise RuntimeError("the table was missed")

    return lambda: apply("bench_attention", args=(q, k, v), fallback=fallback)


def _flashinfer_traces(q: Tensor) -> dict[str, Any]:
    from flashinfer_bench import data

    heads, tokens, width = q.shape[1:]
    shape = ["batch", "heads", "tokens", "width"]
    tensor = {"shape": shape, "dtype": "float32"}
    definition = data.Definition(
        name="bench_attention",
        op_type="attention",
        axes={
            "batch": data.AxisVar(),
            "heads": data.AxisConst(value=heads),
            "tokens": data.AxisConst(value=tokens),
            "width": data.AxisConst(value=width),
        },
        inputs={name: data.TensorSpec(**tensor) for name in "qkv"},
        outputs={"out": data.TensorSpec(**tensor)},
        reference="import torch\ndef run(q, k, v):\n"
        "    return torch.nn.functional.scaled_dot_product_attention(q, k, v)\n",
    )
    source = definition.reference
    spec: dict[str, Any] = {"language": "python", "target_hardware": ["cpu"], "entry_point": "main.py::run"}
    if "destination_passing_style" in data.BuildSpec.model_fields:
        spec["destination_passing_style"] = False
    solution = data.Solution(
        name="bench_torch",
        definition="bench_attention",
        author="bench",
        spec=data.BuildSpec(**spec),
        sources=[data.SourceFile(path="main.py", content=source)],
    )
    trace = data.Trace(
        definition="bench_attention",
        workload=data.Workload(
            axes={"batch": q.shape[0]}, inputs={n: data.RandomInput() for n in "qkv"}, uuid="bench"
        ),
        solution="bench_torch",
        evaluation=data.Evaluation(
            status=data.EvaluationStatus.PASSED,
            environment=data.Environment(hardware="cpu"),
            timestamp="2026-01-01T00:00:00",
            correctness=data.Correctness(),
            performance=data.Performance(latency_ms=1.0, reference_latency_ms=2.0, speedup_factor=2.0),
        ),
    )
    return {
        "definitions": {"bench_attention": definition},
        "solutions": {"bench_attention": [solution]},
        "traces": {"bench_attention": [trace]},
    }


def kernel_set_dispatch(stack: ExitStack, q: Tensor, k: Tensor, v: Tensor) -> Call:
    """`ks.dispatch.attention_prefill`, tokens before heads."""
    import kernel_set

    a, b, c = (t.transpose(1, 2).contiguous() for t in (q, k, v))
    return lambda: kernel_set.dispatch.attention_prefill(a, b, c, causal=False)


PEERS: dict[str, tuple[str, Opened]] = {
    "transformers": ("ALL_ATTENTION_FUNCTIONS, sdpa", transformers_interface),
    "kernels": ("a kernelized layer, no mapping", hf_kernels),
    "diffusers": ("dispatch_attention_fn", diffusers_dispatch),
    "flashinfer-bench": ("apply, table hit", flashinfer_bench_apply),
    "kernel-set": ("dispatch.attention_prefill", kernel_set_dispatch),
}


@contextmanager
def _opened(q: Tensor, k: Tensor, v: Tensor) -> Iterator[tuple[dict[str, Call], dict[str, str]]]:
    """The peers that answered one call here, and why the others did not."""
    calls: dict[str, Call] = {}
    refused: dict[str, str] = {}
    with ExitStack() as stack:
        for name, (_, opener) in PEERS.items():
            try:
                call = opener(stack, q, k, v)
                call()
            except ImportError as error:
                refused[name] = f"not installed: {error}"
            except Exception as error:  # whatever stops a peer here is a result, with its words
                refused[name] = f"does not run here: {type(error).__name__}: {error}"[:400]
            else:
                calls[name] = call
        yield calls, refused


def compare(plan: Plan, q: Tensor, k: Tensor, v: Tensor) -> dict[str, Any]:
    """One attention call through everybody, in the same rounds; what each costs beyond torch's own call."""
    bound = lz.bind("attention", q, k, v)
    ours: dict[str, Call] = {
        "torch": lambda: functional.scaled_dot_product_attention(q, k, v),
        "layerzero_sync": lambda: lz.sync.attention(q, k, v),
        "layerzero_bound": lambda: bound(q, k, v),
    }
    with _opened(q, k, v) as (calls, refused):
        arms = interleave(plan, **ours, **calls)
    result: dict[str, Any] = {}
    for name, arm in arms.items():
        what = PEERS[name][0] if name in PEERS else name
        beyond = over(arm, arms["torch"])
        result[name] = {"what": what, "total": us(arm), "over_torch": beyond, "refused": None}
    for name, why in refused.items():
        result[name] = {"what": PEERS[name][0], "total": None, "over_torch": None, "refused": why}
    result["kernel-set lookup"] = _kernel_set_lookup(plan)
    return result


def _kernel_set_lookup(plan: Plan) -> dict[str, Any]:
    """kernel-set's choice alone, which needs no GPU: a lookup by (op, architecture, dtype)."""
    what = "dispatch.which, as for sm90 bf16"
    try:
        import kernel_set

        which = kernel_set.dispatch.which
        which("attention_prefill", "sm90", "bf16")
    except Exception as error:
        why = f"does not run here: {type(error).__name__}: {error}"[:400]
        return {"what": what, "total": None, "over_torch": None, "refused": why}
    arms = interleave(plan, call=lambda: which("attention_prefill", "sm90", "bf16"))
    return {"what": what, "total": us(arms["call"]), "over_torch": None, "refused": None}
