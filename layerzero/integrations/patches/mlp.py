"""Feed-forward blocks by `mlp`: gated ones of two or three projections, and plain ones of two."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import layerzero.sync as sync
from layerzero._util import foreign, log
from layerzero.integrations.patches import probe
from layerzero.integrations.patches.substitute import (
    PLAIN,
    PatchedForward,
    class_name,
    has_hooks,
    in_graph,
    is_left_alone,
    modes,
)
from layerzero.ops.linear.mlp import GATES, mlp_reference
from layerzero.ops.linear.mlp import PLAIN as UNGATED

NAMES = ("mlp", "feedforward", "feed_forward", "densegatedactdense", "denseactdense", "ffn",
         "experts")  # fmt: skip
# The first projection of a block that has no module, or a nameless one, in its layer.
_IN_LAYERS = frozenset({"fc1", "ffn", "lin1", "linear1"})
# How often the gate's and the value's weights are put into one matrix anew after something moved them.
JOINS = 4
# Of the rows that a block is tried with: usual ones, and some beyond the bounds that blocks put on numbers.
SCALES = (1.0, 1e5)
WEIGHTS_APART = "integrations.weights_apart"
C, F = 8, 12
_LINEAR = nn.Linear  # the compiler guards on each step to a name


class MlpForward(PatchedForward):
    """`module(x)` by `mlp` while nothing needs a gradient.

    The op wants the gate's rows above the value's in one matrix. The first call puts the two weights there:
    both stay parameters with their numbers. Moved weights are put together again, `JOINS` times in all; after
    that the block computes by itself.
    """

    part, op = "mlp", "mlp"

    def __init__(
        self, module: nn.Module, up: tuple[str, ...], down: str, activation: str, drops: bool
    ) -> None:
        super().__init__(module)
        others = tuple(n for n, part in module._modules.items() if part is not None and n not in (*up, down))
        self.learnt = up, down, activation, others, drops
        self.joins = 0
        self.joint: StorageWeakRef | None = None  # the weights alone keep it alive

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """One tensor by the op; anything else by the module itself."""
        if len(args) != 1 or kwargs:
            return self.decline("arguments", args, kwargs)
        x, inside = args[0], self.module.__dict__["_modules"]
        up, down_name, activation, others, drops = self.learnt
        ups: list[Any] = [inside[name] for name in up]
        down: Any = inside[down_name]
        if type(x) is Tensor and x.device.type == "meta":
            return self.original(x)
        why = "hooks" if _has_hooks_everywhere() else _obstacle(self.module, x, [*ups, down], others, drops)
        if why:
            return self.decline(why, args, kwargs)
        weight, bias = ups[0].weight, ups[0].bias
        if len(ups) == 2 and foreign.is_traced():
            return self.decline("transform", args, kwargs)
        if len(ups) == 2:
            joint = self._joined(ups[0].weight, ups[1].weight)
            if joint is None and self.joins < JOINS:
                joint = self._join(ups[0].weight, ups[1].weight)
            if joint is None:
                if self.joins == JOINS:
                    _warn_apart(self.kind.__name__)
                return self.decline("weights apart", args, kwargs)
            weight, bias = joint, None if bias is None else torch.cat((bias, ups[1].bias))
        return sync.mlp(x, weight, down.weight, bias, down.bias, activation=activation)

    @staticmethod
    def traced(kind: Any, learnt: Callable[[], Any]) -> Callable[..., Any]:
        """The same in a graph, where the gate and the value are products of their own."""
        linear, mlp = in_graph("linear"), in_graph("mlp")
        gate_of = GATES.get(learnt()[2])

        def run(module: Any, *args: Any, **kwargs: Any) -> Any:
            names, last, activation, others, drops = learnt()
            if len(args) != 1 or kwargs or is_left_alone(args[0]):
                return kind.forward(module, *args, **kwargs)
            x, ups, down = args[0], [module._modules[name] for name in names], module._modules[last]
            if _obstacle(module, x, [*ups, down], others, drops):
                return kind.forward(module, x)
            if len(ups) == 1 or gate_of is None:
                return mlp(x, ups[0].weight, down.weight, ups[0].bias, down.bias, activation=activation)
            gate, value = [linear(x, up.weight, up.bias) for up in ups]
            return linear(gate_of(gate) * value, down.weight, down.bias)

        return run

    def _joined(self, gate: Tensor, value: Tensor) -> Tensor | None:
        """Both weights as one matrix, where they still lie in the one that they were put into."""
        storage: Any = None
        if self.joint is not None:
            storage = torch.UntypedStorage._new_with_weak_ptr(self.joint.cdata)
        if storage is None or gate.shape != value.shape or storage.nbytes() != gate.nbytes + value.nbytes:
            return None
        start: int = storage.data_ptr()
        lie_there = gate.data_ptr() == start and value.data_ptr() == start + gate.nbytes
        if not lie_there or not (gate.is_contiguous() and value.is_contiguous()):
            return None
        rows, width = gate.shape
        return gate.new_empty(0).set_(storage, 0, (2 * rows, width), (width, 1))

    def _join(self, gate: Tensor, value: Tensor) -> Tensor | None:
        """Put two projections' weights into one matrix, whose halves they become.

        Not what other processes write, and not what lies in a larger buffer, through which others write.
        """
        self.joins += 1
        if gate.shape != value.shape or gate.device != value.device or gate.device.type == "meta":
            return None
        for weight in (gate, value):
            shared = weight.device.type == "cpu" and weight.is_shared()
            if shared or weight.untyped_storage().nbytes() != weight.nbytes:
                return None
        with torch.inference_mode(False), torch.no_grad():
            joint = torch.cat((gate.data, value.data))
            storage = joint.untyped_storage()
            halves = _part(storage, 0, gate), _part(storage, gate.nbytes, value)
            gate.data, value.data = halves
        self.joint = StorageWeakRef(storage)
        return joint

    def remove(self) -> None:
        """Give each projection a weight of its own again, too."""
        super().remove()
        ups: list[Any] = [self.module._modules[name] for name in self.learnt[0]]
        if len(ups) == 2 and all(is_linear(linear) for linear in ups):
            first, second = (linear.weight for linear in ups)
            if type(first) in PLAIN and type(second) in PLAIN and self._joined(first, second) is not None:
                for weight in (first, second):
                    weight.data = weight.data.clone()

    def __getstate__(self) -> dict[str, Any]:
        """A copy has weights of its own, which are apart."""
        return {**self.__dict__, "joint": None, "joins": 0}


def _obstacle(module: Any, x: Any, linears: list[Any], others: tuple[str, ...], drops: bool) -> str:
    """Why this call is not for the op; empty where it is. `drops`: a function drops numbers in training."""
    if not all(is_linear(linear) for linear in linears):
        return "projections"
    # By the dictionary: torch's compiler guards on every place that an attribute could have been in.
    if has_hooks(linears) or module.__dict__.get("_is_fsdp_managed_module", False):
        return "hooks"
    # Of an activation, say: those that its own forward would run.
    if any(part._forward_hooks or part._forward_pre_hooks for part in map(module._modules.get, others)):
        return "hooks"
    weights = [value for linear in linears for value in (linear.weight, linear.bias) if value is not None]
    # By `__class__`: the compiler guards on what `type` gives beside the tensor.
    if type(x) is not Tensor or any(weight.__class__ not in PLAIN for weight in weights):
        return "tensor subclass"
    if any(weight.dtype is not x.dtype for weight in weights):
        return "dtypes"
    cast, learns = modes(x.device.type)
    if cast is not None:
        return "autocast"
    if learns and (x.requires_grad or any(weight.requires_grad for weight in weights)):
        return "gradient"
    if module.training and (drops or any(isinstance(m, nn.Dropout) and m.p for m in module.children())):
        return "dropout"
    return ""


def _has_hooks_everywhere() -> bool:
    """Whether a hook waits for every module of the process; torch's compiler follows none."""
    return bool(cast(Any, nn.modules.module)._has_any_global_hook())


@functools.cache
def _warn_apart(module: str) -> None:
    """Say once for each class of module that a block of it computes by itself from now on."""
    why = f"its weights need to stay where they are put together, got {JOINS} tries that did not last"
    log.warning(WEIGHTS_APART, module=module, why=why)


def _part(storage: torch.UntypedStorage, start: int, like: Tensor) -> Tensor:
    """What lies from byte `start` on, with the shape of `like`, as a storage of its own over that memory.

    Libraries that save weights believe that two parameters of one storage are one.
    """
    part, (rows, width) = cast(Any, storage), like.shape
    return like.new_empty(0).set_(part[start : start + like.nbytes], 0, (rows, width), (width, 1))


def is_mlp(module: nn.Module) -> bool:
    """Whether a module's class says that it is a feed-forward block, or the block is a part of this layer."""
    kind = type(module).__name__.lower()
    named = any(name in kind for name in NAMES) and bool(module._modules or module._parameters)
    return named or _is_spread(module)


def _is_spread(module: nn.Module) -> bool:
    """Whether a feed-forward block's projections lie in its layer, or each in a module of its own."""
    kind, inside = type(module).__name__.lower(), module._modules
    halves = kind.endswith("intermediate") and "dense" in inside
    return halves or (kind.endswith("layer") and not inside.keys().isdisjoint(_IN_LAYERS))


def substitute(module: nn.Module) -> MlpForward | str:
    """The block on our op, or why it has none."""
    if _is_spread(module):
        return "its projections are in no module of their own"
    linears: dict[str, Any] = {name: part for name, part in module._modules.items() if _projects(part)}
    strange = sorted({class_name(part) for part in linears.values() if not is_linear(part)})
    if strange:
        return f"its projections are {', '.join(strange)}, not torch's Linear"
    if any(parameter is not None and parameter.dim() == 3 for parameter in module._parameters.values()):
        return "its experts are chosen before it; the op `moe` chooses them itself"
    if module._parameters or len(linears) not in (2, 3):
        return f"it has {len(linears)} projections" if linears else "it has no projections of its own"
    if any(list(part.parameters()) for name, part in module._modules.items() if name not in linears and part):
        return "it has trained parts beside its projections"
    *ups, down = linears
    gated = len(ups) == 2
    small: dict[str, nn.Module] = {}
    weights: list[Any] = []
    for index, (name, linear) in enumerate(linears.items()):
        wide = not gated and linear.out_features == 2 * linears[down].in_features
        shape = (C, F) if name == down else (2 * F if wide else F, C)
        weights.append(_linear(shape, linear.bias is not None, seed=10 * index))
        small[name] = weights[-1]
    rest = {
        name: nn.Identity() if isinstance(part, nn.Dropout) else part
        for name, part in module._modules.items()
        if name not in linears and part is not None
    }
    double = probe.stand_in(module, {}, {**rest, **small})
    rows = [probe.numbers(3, C, seed=5, scale=scale) for scale in SCALES]
    theirs = [probe.answer(type(module).forward, double, x) for x in rows]
    for order in ((0, 1), (1, 0)) if gated else ((0,),):
        up = torch.cat([weights[i].weight for i in order])
        biases = [weights[i].bias for i in order]
        if (biases[0] is None) != (biases[-1] is None):
            return "one of its gated projections has a bias, the other has none"
        bias = None if biases[0] is None else torch.cat(biases)
        for activation in GATES if up.shape[0] == 2 * F else UNGATED:
            last = weights[-1].weight, bias, weights[-1].bias, activation
            if all(probe.same(mlp_reference(x, up, *last), y) for x, y in zip(rows, theirs, strict=True)):
                double.training = True
                with torch.random.fork_rng(devices=[]):
                    drops = not probe.same(probe.answer(type(module).forward, double, rows[0]), theirs[0])
                return MlpForward(module, tuple(ups[i] for i in order), down, activation, drops)
    return (
        "no activation of the op gives what it computes"
        if isinstance(theirs[0], Tensor)
        else probe.why_not(theirs[0])
    )


def _projects(part: nn.Module | None) -> bool:
    """Whether a part has a matrix of weights, whatever its class."""
    weight = None if part is None else getattr(part, "weight", None)
    return isinstance(part, nn.Linear) or (isinstance(weight, Tensor) and weight.dim() == 2) or (
        part is not None and "linear" in type(part).__name__.lower()
    )  # fmt: skip


def is_linear(part: object) -> bool:
    """Whether a part is torch's Linear, or of a class of it whose forward gives the same numbers.

    A graph cannot try a class: of torch's own alone, there.
    """
    kind: Any = type(part)
    if kind is _LINEAR:
        return True
    return isinstance(part, nn.Linear) and not torch.compiler.is_compiling() and _gives_linear(kind)


@functools.cache
def _gives_linear(kind: Any) -> bool:
    rows = [probe.numbers(3, C, seed=7, scale=scale) for scale in SCALES]
    plain = [_linear((F, C), bias, seed=8) for bias in (True, False)]
    doubles = [probe.stand_in(linear, dict(linear.named_parameters())) for linear in plain]
    for linear, double in zip(plain, doubles, strict=True):
        double.__class__ = kind
        double._parameters.setdefault("bias", None)
        if not all(probe.same(probe.answer(linear, x), probe.answer(kind.forward, double, x)) for x in rows):
            return False
    return True


def _linear(shape: tuple[int, int], bias: bool, seed: int) -> nn.Linear:
    """A small projection with random numbers."""
    linear = nn.Linear(shape[1], shape[0], bias=bias, dtype=torch.float32, device="meta")  # draws nothing
    for offset, (name, parameter) in enumerate(list(linear.named_parameters())):
        values = probe.numbers(*parameter.shape, seed=seed + offset)
        setattr(linear, name, nn.Parameter(values, requires_grad=False))
    return linear
