"""Causal losses by `linear_cross_entropy`: while a model trains with labels, its logits wait."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils import _pytree as pytree

import layerzero.sync as sync
from layerzero._util import foreign
from layerzero.integrations.patches.substitute import (
    PLAIN,
    SUBSTITUTE,
    PatchedForward,
    autocast_dtype,
    class_name,
    has_hooks,
)

# The head whose model computes its loss right now.
_TRAINING: ContextVar[nn.Module | None] = ContextVar("layerzero_training_head", default=None)
# What torch's compiler starts at where a model is compiled.
_FORWARDS = frozenset({"__call__", "forward", "inner", "_call_impl", "_wrapped_call_impl"})
_FLOATS = (torch.float32, torch.bfloat16)
_GETTERS = ("shape", "dtype", "device", "layout", "ndim")
_SHAPE = frozenset(
    {
        *(getattr(Tensor, name).__get__ for name in _GETTERS),
        Tensor.size, Tensor.dim, Tensor.numel, Tensor.is_floating_point,
    }
)  # fmt: skip


class LazyLogits(Tensor):
    """Logits of `rows` (..., K) by `weight` (V, K), computed when a function of torch reads them."""

    rows: Tensor
    weight: Tensor
    bias: Tensor | None
    computed: Tensor | None
    versions: list[int]
    has_gradient: bool

    @staticmethod
    def __new__(
        cls, rows: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype | None = None
    ) -> LazyLogits:
        later: Any = Tensor._make_wrapper_subclass(
            cls, (*rows.shape[:-1], weight.shape[0]), dtype=dtype or rows.dtype, device=rows.device
        )
        later.rows, later.weight, later.bias, later.computed = rows, weight, bias, None
        later.versions, later.has_gradient = _versions(later), False
        return later  # type: ignore[no-any-return]

    @staticmethod
    def of(rows: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype | None = None) -> LazyLogits:
        """Logits with a gradient, where gradients are on."""
        later: LazyLogits = _Later.apply(rows, weight, bias, dtype)  # type: ignore[no-untyped-call]
        later.has_gradient = torch.is_grad_enabled()
        return later

    def now(self) -> Tensor:
        """The logits, computed once, with their gradient whatever the reader's modes are.

        Raises: RuntimeError: what they are computed from was changed since.
        """
        if self.computed is None:
            if _versions(self) != self.versions:
                raise RuntimeError(
                    "logits of a model patched for loss need to be read before its weights change, got an "
                    "optimizer's step first: read them before it, or patch without the part 'loss'"
                )
            with (
                torch.inference_mode(False),
                torch.set_grad_enabled(self.has_gradient),
                torch.autocast(self.rows.device.type, enabled=False),
            ):
                self.computed = functional.linear(self.rows, self.weight, self.bias).to(self.dtype)
        return self.computed

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Shapes without the numbers, a cast as another one that waits, all else with them."""
        if function in _SHAPE:
            with torch._C.DisableTorchFunctionSubclass():
                return function(*args, **(kwargs or {}))
        if function is Tensor.float and len(args) == 1 and args[0].computed is None:
            self = args[0]
            if self.dtype is torch.float32:
                return self
            with torch.set_grad_enabled(self.has_gradient and torch.is_grad_enabled()):
                return LazyLogits.of(self.rows, self.weight, self.bias, torch.float32)
        args, kwargs = pytree.tree_map_only(LazyLogits, LazyLogits.now, (args, kwargs or {}))
        return function(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Raise: below torch's functions the numbers would lose their gradient."""
        raise RuntimeError(
            f"logits that were not computed reached {function}; read them with torch's functions"
        )


class _Later(torch.autograd.Function):
    """The gradient of waiting logits, for a function of autograd, which gets them as they are."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, bias: Any, dtype: Any) -> LazyLogits:
        ctx.save_for_backward(rows, weight)
        return LazyLogits(rows, weight, bias, dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (rows, weight), asks = ctx.saved_tensors, ctx.needs_input_grad
        grad = grads[0].to(rows.dtype)
        flat = grad.flatten(0, -2)
        of_weight = flat.T @ rows.flatten(0, -2) if asks[1] else None
        return grad @ weight if asks[0] else None, of_weight, flat.sum(0) if asks[2] else None, None


def _versions(of: LazyLogits) -> list[int]:
    """How often each tensor that the logits are computed from was written."""
    tensors = (of.rows, of.weight, of.bias)
    return [t._version for t in tensors if t is not None and not t.is_inference()]


def _is_part_of_a_step() -> bool:
    """Whether torch's compiler traces a function that calls a model, and not a model alone."""
    from torch._dynamo import symbolic_convert

    tracer: Any = getattr(symbolic_convert.tls, "current_tx", None)
    return tracer is not None and tracer.output.root_tx.f_code.co_name not in _FORWARDS


# The compiler takes what it returns for a constant of the graph, without a guard.
_is_part_of_a_step._dynamo_marked_constant = True  # type: ignore[attr-defined]


class CausalForward(PatchedForward):
    """A causal model's own forward, in which the head's logits may wait while it trains with labels."""

    part, op = "loss", "linear_cross_entropy"

    def __init__(self, module: Any, head: nn.Linear) -> None:
        super().__init__(module)
        self.head = HeadForward(head)
        self.loss = CausalLoss(module.loss_function, head)
        self.loss_before = module.__dict__.get("_loss_function")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward."""
        if not self.module.training or kwargs.get("labels") is None:
            return self.original(*args, **kwargs)
        token = _TRAINING.set(self.head.module)
        try:
            return self.original(*args, **kwargs)
        finally:
            _TRAINING.reset(token)

    @staticmethod
    def traced(kind: Any, learnt: Callable[[], Any]) -> Callable[..., Any]:
        """In the graph of a whole step the loss gets what the head got; logits that are not read fall out."""

        def run(module: Any, *args: Any, **kwargs: Any) -> Any:
            # In this order: labels that are looked at here make one graph more of a model alone.
            if not _is_part_of_a_step() or not module.training or kwargs.get("labels") is None:
                return kind.forward(module, *args, **kwargs)
            substitute = module.__dict__[SUBSTITUTE]
            substitute.head.projected = substitute.loss.projected = []
            output = kind.forward(module, *args, **kwargs)
            substitute.head.projected = substitute.loss.projected = None
            return output

        return run

    @staticmethod
    def methods(kind: Any) -> dict[str, Callable[..., Any]]:
        """`train`, which the head follows: outside training it is of torch's class, for which others look."""

        def train(self: Any, mode: bool = True) -> Any:
            result = kind.train(self, mode)
            substitute = self.__dict__.get(SUBSTITUTE)
            if substitute is not None:
                substitute.head.follow(mode)
            return result

        return {"train": train}

    def install(self) -> None:
        """Put the model's forward, its head's and its loss in place."""
        super().install()
        self.head.follow(self.module.training)
        model: Any = self.module
        model.loss_function = self.loss

    def remove(self) -> None:
        """Restore all three."""
        super().remove()
        self.head.remove()
        self.loss.enabled = False
        if self.module.__dict__.get("_loss_function") is self.loss:
            del self.module._loss_function
            if self.loss_before is not None:
                self.module.loss_function = self.loss_before


class HeadForward(PatchedForward):
    """The last projection: logits that wait where the loss alone may need them."""

    part, op = "loss", "linear_cross_entropy"

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        # While a step is traced: its rows and its logits.
        self.projected: list[Any] | None = None

    def follow(self, training: bool) -> None:
        """Be in place while the model trains, unless a library has made a class of the head's since."""
        if training and type(self.module) is self.kind:
            self.install()
        elif not training and type(self.module) is self._patched():
            self.remove()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Logits, later inside a training model's forward."""
        if _TRAINING.get() is not self.module:
            return self.original(*args, **kwargs)
        why = self._obstacle(args, kwargs)
        if why:
            return self.decline(why, args, kwargs)
        head: Any = self.module
        rows, weight, bias = args[0], head.weight, head.bias
        cast = autocast_dtype(rows)
        if cast is not None:
            rows, weight, bias = rows.to(cast), weight.to(cast), None if bias is None else bias.to(cast)
        return LazyLogits.of(rows, weight, bias)

    @staticmethod
    def traced(kind: Any, learnt: Callable[[], Any]) -> Callable[..., Any]:
        """Logits; in the graph of a step the loss gets what they are of."""

        def run(module: Any, *args: Any, **kwargs: Any) -> Any:
            logits = kind.forward(module, *args, **kwargs)
            if _is_part_of_a_step():
                head = module.__dict__[SUBSTITUTE]
                if head.projected is not None and not head._obstacle(args, kwargs):
                    head.projected += [args[0], logits]
            return logits

        return run

    def _obstacle(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        linear: Any = self.module
        if len(args) != 1 or kwargs:
            return "arguments"
        if self.kind is not nn.Linear or type(args[0]) is not Tensor or type(linear.weight) not in PLAIN:
            return "tensor subclass"
        if foreign.in_transform():
            return "transform"
        if (
            linear._forward_hooks
            or linear._forward_pre_hooks
            or getattr(linear, "_is_fsdp_managed_module", False)
        ):
            return "hooks"
        cast = autocast_dtype(args[0])
        dtypes = {cast} if cast is not None else {args[0].dtype, linear.weight.dtype}
        return "" if len(dtypes) == 1 and dtypes <= set(_FLOATS) else "dtypes"


class CausalLoss:
    """transformers' causal loss: of waiting logits by `linear_cross_entropy`, in a graph by `cross_entropy`.

    A graph of the model returns the logits, so that their product would be there twice with the loss of it
    fused. That of a step which calls the model may leave them out: there it is `linear_cross_entropy`.
    """

    def __init__(self, original: Any, head: Any) -> None:
        self.original, self.head = original, head
        self.projected: list[Any] | None = None
        self.enabled = True

    def __call__(self, logits: Any, labels: Any, vocab_size: int, *args: Any, **kwargs: Any) -> Any:
        """As `ForCausalLMLoss`: the mean over the targets, or their sum by `num_items_in_batch`."""
        waiting = logits if type(logits) is LazyLogits and logits.computed is None else None
        traced = torch.compiler.is_compiling() and type(logits) is Tensor
        projected: Any = self.projected if traced and self.projected else (None, None)
        if not self.enabled or (waiting is None and not traced) or args or logits.shape[-1] != vocab_size:
            return self.original(logits, labels, vocab_size, *args, **kwargs)
        ignored = kwargs.get("ignore_index", -100)
        target, items = kwargs.get("shift_labels"), kwargs.get("num_items_in_batch")
        if target is None:
            target = functional.pad(labels, (0, 1), value=ignored)[..., 1:]
        target = target.reshape(-1).to(logits.device)
        reduction: Any = "mean" if items is None else "sum"
        if waiting is not None:
            rows = waiting.rows.reshape(-1, waiting.rows.shape[-1])
            with torch.autocast(rows.device.type, enabled=False):
                loss = sync.linear_cross_entropy(
                    rows, waiting.weight, target, waiting.bias, ignore_index=ignored, reduction=reduction
                ).float()
        elif projected[1] is logits and autocast_dtype(logits) is None:
            rows = projected[0].reshape(-1, projected[0].shape[-1])
            loss = sync.linear_cross_entropy(
                rows, self.head.weight, target, self.head.bias, ignore_index=ignored, reduction=reduction
            ).float()
        else:
            rows = logits.float().reshape(-1, vocab_size)
            loss = sync.cross_entropy(rows, target, ignore_index=ignored, reduction=reduction)
        if items is None:
            return loss
        return loss / (items.to(loss.device) if isinstance(items, Tensor) else items)


def substitute(model: Any) -> CausalForward | str:
    """The causal model with a fused loss, or why it has none."""
    from transformers.loss.loss_utils import ForCausalLMLoss

    code = getattr(inspect.unwrap(type(model).forward), "__code__", None)
    if code is None or "loss_function" not in code.co_names:
        return "it computes no loss, or by itself"
    loss = model.loss_function
    if loss is not ForCausalLMLoss:
        return f"its loss is {getattr(loss, '__name__', type(loss).__name__)}, not transformers' causal one"
    head = model.get_output_embeddings()
    if type(head) is not nn.Linear:
        return f"its head is {class_name(head)}, not torch's Linear"
    if has_hooks((head,)):
        return "its head has hooks"
    return CausalForward(model, head)
