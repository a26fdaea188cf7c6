"""Norms over the last axis: `rms_norm` and `layer_norm`, whatever their class is called."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import layerzero.sync as sync
from layerzero.integrations.patches import probe
from layerzero.integrations.patches.substitute import PLAIN, PatchedForward, in_graph, modes
from layerzero.ops.norm.layer_norm import layer_norm_reference
from layerzero.ops.norm.rms_norm import rms_norm_reference

EPSILONS = ("eps", "variance_epsilon", "epsilon", "norm_eps", "layer_norm_eps")
# Of a norm without a weight that says its width.
WIDTH = 16
# Rows at a size where eps decides, and at one where it does not.
SCALES = (1e-3, 1.0)


class NormForward(PatchedForward):
    """`module(x)` by `rms_norm` or `layer_norm`; `shift` is added to the weight, as Gemma's norms do."""

    part = "norm"

    def __init__(self, module: nn.Module, op: str, eps: float, shift: float) -> None:
        super().__init__(module)
        has = (module._parameters.get(name) is not None for name in ("weight", "bias"))
        self.op, self.learnt = op, (op, eps, shift, *has)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """One tensor by the op; anything else by the module itself."""
        if len(args) != 1 or kwargs:
            return self.decline("arguments", args, kwargs)
        x, (op, eps, shift, has_weight, has_bias), inside = args[0], self.learnt, self.module._parameters
        weight, bias = inside.get("weight"), inside.get("bias")
        if has_weight and weight is None:  # computed, or put in place by a hook or FSDP's flat parameter
            weight = self.module.weight
        if has_bias and bias is None:
            bias = self.module.bias
        if type(x) is not Tensor or (weight is not None and type(weight) not in PLAIN):
            return self.decline("tensor subclass", args, kwargs)
        if x.device.type == "meta":
            return self.original(x)
        # Classes differ in the dtype of what they return for mixed ones.
        if weight is not None and weight.dtype is not x.dtype:
            return self.decline("dtypes", args, kwargs)
        if x.dtype is not torch.float32 and modes(x.device.type)[0] is not None:
            return self.decline("autocast", args, kwargs)
        if op == "rms_norm":
            if shift and weight is not None:
                weight = weight.float() + shift
            return sync.rms_norm(x, weight, eps=eps)
        return sync.layer_norm(x, weight, bias, eps=eps)

    @staticmethod
    def traced(kind: Any, learnt: Callable[[], Any]) -> Callable[..., Any]:
        """The same in a graph."""
        norm = in_graph(learnt()[0])

        def run(module: Any, *args: Any, **kwargs: Any) -> Any:
            op, eps, shift, has_weight, has_bias = learnt()
            if len(args) != 1 or kwargs or type(args[0]) is not Tensor:
                return kind.forward(module, *args, **kwargs)
            x, weight = args[0], module.weight if has_weight else None
            lowered = x.dtype is not torch.float32 and modes(x.device.type)[0] is not None
            if lowered or (weight is not None and weight.dtype is not x.dtype):
                return kind.forward(module, x)
            if op == "layer_norm":
                return norm(x, weight, module.bias if has_bias else None, eps=eps)
            if shift and weight is not None:
                weight = weight.float() + shift
            return norm(x, weight, eps=eps)

        return run


def is_norm(module: nn.Module) -> bool:
    """Whether a module's class says that it is a norm: it has that name, and no modules inside."""
    return "norm" in type(module).__name__.lower() and not module._modules


def substitute(module: nn.Module) -> NormForward | str:
    """The norm on our op, or why it has none."""
    if len(inspect.signature(type(module).forward).parameters) != 2:
        return "it takes more than rows"
    sizes = getattr(module, "normalized_shape", None)
    if sizes is not None and not isinstance(sizes, int) and len(sizes) != 1:
        return "it norms over several axes"
    if any(value is not None for value in module._buffers.values()) or set(module._parameters) - {
        "weight",
        "bias",
    }:
        return "it keeps more than a weight and a bias"
    eps = next((value for name in EPSILONS if isinstance(value := module.__dict__.get(name), float)), None)
    if eps is None:
        return "it has no eps of its own"
    vectors = [module._parameters.get(name) for name in ("weight", "bias")]
    if any(vector is not None and vector.dim() != 1 for vector in vectors):
        return "its weight is no vector"
    width = next((vector.shape[0] for vector in vectors if vector is not None), WIDTH)
    if sizes is not None:
        width = sizes if isinstance(sizes, int) else sizes[0]
    weight = 1 + probe.numbers(width, seed=1) if vectors[0] is not None else None
    bias = probe.numbers(width, seed=2) if vectors[1] is not None else None
    parameters = {
        name: value for name, value in (("weight", weight), ("bias", bias)) if name in module._parameters
    }
    double = probe.stand_in(module, parameters)
    forms: dict[tuple[str, float], Any] = {
        ("layer_norm", 0.0): lambda x: layer_norm_reference(x, weight, bias, eps)
    }
    if bias is None:
        forms["rms_norm", 0.0] = lambda x: rms_norm_reference(x, weight, eps)
        if weight is not None:
            forms["rms_norm", 1.0] = lambda x: rms_norm_reference(x, weight + 1, eps)
    # Three axes, so that a norm over any but the last refuses them, or gives other numbers.
    others = (2, 5) if width != 5 else (2, 7)
    rows = [probe.numbers(*others, width, seed=3, scale=scale) for scale in SCALES]
    theirs = [probe.answer(type(module).forward, double, x) for x in rows]
    for (op, shift), form in forms.items():
        if all(probe.same(form(x), result) for x, result in zip(rows, theirs, strict=True)):
            return NormForward(module, op, eps, shift)
    return probe.why_not(theirs[-1])
