"""The contract of an op: its signature, its checks, its plain-torch reference, its batching rule.

An op file defines one `Op` per operation. The awaitable function, the blocking function, the contract
tests and the documentation table all come from it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Container, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, ParamSpec, Protocol, runtime_checkable

import torch
from torch import Tensor

from layerzero.spec.call_spec import CallSpec, OutputSpec, WorkEstimate

Signature = tuple[Any, ...]
Args = tuple[Any, ...]
SignedCall = tuple[Signature, Args]
LaunchFunction = Callable[[Args], Any]
P = ParamSpec("P")

# What is float32 under autocast, as torch's own functions of these names are.
WIDENED: Final = frozenset({"cross_entropy", "linear_cross_entropy"})


@dataclass(frozen=True, slots=True, eq=False)
class RejectedCall:
    """What a batching rule returns for a call that it must not run beside the others: the caller's error."""

    error: Exception


@runtime_checkable
class Launcher(Protocol):
    """A launch that can be asked first, and launches other ops too: what a batcher gives a batching rule.

    `is_unconstrained` says that no policy speaks about the op and nothing asks for its own bits: the rule may
    launch another op that means the same. `expected_us` is a launch's cost, infinite without a kernel.
    """

    @property
    def is_unconstrained(self) -> bool: ...

    def __call__(self, args: Args, op: Op | None = None) -> Any: ...

    def expected_us(self, args: Args, op: Op | None = None) -> float: ...


class Batching:
    """How calls of several callers become fewer launches, and back.

    Whatever a rule does not put together has to be the same for all of a batch: a rule names the operands
    that its `run` joins (`concat_positions`), and what those need in common (`compatibility`). Every other
    tensor is in the group by its memory and every other value by itself, so that an argument which a rule
    does not know keeps callers apart. `rowwise` says that rows of different callers do not touch each other
    inside the kernel.
    """

    __slots__ = ()

    rowwise: ClassVar[bool] = False  # a kernel may look at several rows of a caller together
    weights: tuple[int, ...] = ()  # operands in which calls of one batch may differ, a launch for each

    @property
    def concat_positions(self) -> Container[int]:
        """The positions of the operands that `run` puts together."""
        raise NotImplementedError

    def compatibility(self, args: Args) -> Hashable | None:
        """What the joined operands of two calls need in common; None where the call must run alone."""
        raise NotImplementedError

    def batch_cost(self, args: Args) -> tuple[int, int]:
        """What the call adds to a batch: (tokens, bytes)."""
        raise NotImplementedError

    def run(self, calls: Sequence[Args], launch: LaunchFunction) -> list[Any]:
        """Run `calls`, of one group, through as few `launch`es as pay off; one result a call, in order.

        A call that must not run beside the others has `RejectedCall` for its result, in an op that is not
        pure. `launch` takes the arguments of one (merged) call, selects a kernel for it and runs it.
        """
        raise NotImplementedError

    def batch_key(self, args: Args) -> Hashable | None:
        """`compatibility`, and the identity of everything that is not joined; None where it runs alone."""
        compatibility, concat_positions = self.compatibility(args), self.concat_positions
        if compatibility is None:
            return None
        return compatibility, *[
            operand_identity(value) for position, value in enumerate(args) if position not in concat_positions
        ]

    def family_key(self, args: Args) -> Hashable | None:
        """`batch_key` without the memory of `weights`, only what they look like; None without any."""
        compatibility, concat_positions = self.compatibility(args), self.concat_positions
        if compatibility is None or not self.weights:
            return None
        return compatibility, *[
            operand_identity(value, memory=position not in self.weights)
            for position, value in enumerate(args) if position not in concat_positions
        ]  # fmt: skip

    def shared_operands(self, args: Args) -> tuple[int, ...] | None:
        """Positions of the tensors that must be the same memory for two calls to join.

        None where more than that decides, so that the group cannot be remembered by it.
        """
        concat_positions = self.concat_positions
        return tuple(
            p for p, value in enumerate(args) if isinstance(value, Tensor) and p not in concat_positions
        )


def operand_identity(value: Any, *, memory: bool = True) -> Hashable:
    """What makes an argument the same for two callers: tensors by memory and looks, all else by value."""
    if isinstance(value, Tensor):
        looks = (value.shape, value.stride(), value.dtype, value.device)
        return (value.data_ptr(), *looks) if memory else looks
    same: Hashable = value
    return same


@dataclass(frozen=True, slots=True)
class Layouts:
    """Where an op has its layout: operand positions, the layout argument's position, the swapped axes."""

    operands: tuple[int, ...]
    argument: int
    names: tuple[str, str]
    swap: tuple[int, int]
    outputs: tuple[int, ...] = (0,)


@dataclass(frozen=True, slots=True)
class Split:
    """How a call becomes several smaller ones: `cut(args, start, stop)` is the call of a part of size `dim`.

    The first operand and every output have that size in front; outputs of the parts are joined there.
    """

    dim: str
    cut: Callable[[Args, int, int], Args]


@dataclass(frozen=True, slots=True)
class Decoding:
    """How a call over codes becomes one over numbers, for a kernel that takes none.

    `features` are what only the first asks for; `decode(args)` makes the arguments of the second; `written`
    is how many numbers that writes, of a request, `sizes` the sizes of the second that differ.
    """

    features: frozenset[str]
    decode: Callable[[Args], Args]
    written: Callable[[CallSpec], int]
    sizes: Callable[[CallSpec], dict[str, int]] = lambda spec: {}


@dataclass(frozen=True, slots=True, eq=False)
class Op:
    """One operation, by default with the name of its `build`.

    `build(*args, **kwargs)` is the public signature: plain, typed, cheap; it returns `(signature, args)`
    without validating: `signature` is a flat tuple of C-hashed values that holds everything about the call
    that can change the answer (op name first, then of every tensor shape, strides, dtype, device,
    requires_grad; every flag and scalar by value; see `ops/signature.py`), `args` the full tuple of
    arguments that kernels take; `args[0]` is a tensor on the op's device.

    `check(args)` validates (ValueError/TypeError naming the argument, what it needs, what it got) and
    describes the call as a CallSpec; it runs once per new signature, so it may take its time, but it must
    not read tensor data. `validate_values(args)` does (ids in range), before the kernel of any call runs, and
    gives the arguments to run with: whatever says where a kernel reads or writes is a copy made while it was
    checked, so that what was checked is what is read. It looks at CPU tensors alone: those of other devices
    come back as they are, since looking would wait for the device. Of callers in a batch it looks at each
    when it calls; with `validate_values_per_batch` once at the whole batch instead, at its merged arguments,
    and only where that fails at smaller parts until the failing call is alone.

    `reference(*args)` is plain torch, accumulates in float32 (float64 inputs stay float64), and is right for
    everything `check` lets through. `outputs(args)` gives shapes and dtypes; `empty(args)` the result of a
    call that has nothing to compute, else None (outputs without elements, where an op does not say);
    `work(spec)` the least work. `operands` are the positions
    of the tensors that layout, contiguity and alignment speak of; `uncopied_operands` those of more tensors
    that alignment speaks of and that no transform copies (pools, codes); `exact_dims` the sizes that keys
    never round; `split` says how a call above a kernel's bound is cut; `wide_outputs` the outputs whose dtype
    does not follow the operands'. `writes` are the positions of the tensors that the op changes; an op that
    changes any is not `pure`: no fallback, probe or search for a culprit runs it a second time. An op one of
    whose outputs is made of another, as rounded, is not `castable`: in a wider dtype it would mean less
    rounding. `decoding` is how a call over codes is made one over numbers.
    """

    build: Callable[..., SignedCall]
    check: Callable[[Args], CallSpec]
    reference: Callable[..., Any]
    outputs: Callable[[Args], tuple[OutputSpec, ...]]
    work: Callable[[CallSpec], WorkEstimate]
    operands: tuple[int, ...]
    name: str = ""
    uncopied_operands: tuple[int, ...] = ()
    exact_dims: frozenset[str] = field(default_factory=frozenset)
    empty: Callable[[Args], Any] | None = None
    validate_values: Callable[[Args], Args] | None = None
    validate_values_per_batch: bool = False
    batching: Batching | None = None
    layouts: Layouts | None = None
    split: Split | None = None
    pure: bool = True
    writes: tuple[int, ...] = ()
    castable: bool = True
    differentiable: bool = True
    stochastic: bool = False
    wide_outputs: frozenset[int] = field(default_factory=frozenset)
    decoding: Decoding | None = None

    def written(self, args: Args) -> tuple[int, ...]:
        """The positions of the tensors that a call changes: `writes` without those that it leaves out."""
        return tuple(position for position in self.writes if args[position] is not None)

    @property
    def rowwise(self) -> bool:
        """Whether its batching rule joins rows that do not touch each other."""
        return self.batching is not None and self.batching.rowwise

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", self.name or self.build.__name__)
        if self.empty is None:
            object.__setattr__(self, "empty", self._empty_outputs)

    def _empty_outputs(self, args: Args) -> Any:
        """The outputs of a call whose first one has no element; None for every other call."""
        specs: list[OutputSpec] = list(self.outputs(args))
        if 0 not in specs[0].shape:
            return None
        device = self.tensors(args)[0].device
        outputs = tuple(torch.empty(s.shape, dtype=getattr(torch, s.dtype), device=device) for s in specs)
        return outputs[0] if len(outputs) == 1 else outputs

    def casts_back(self, output: int) -> bool:
        """Whether an output follows the operands' dtype: a log-sum-exp and a loss under autocast do not."""
        widened = self.name in WIDENED and torch._C._is_any_autocast_enabled()
        return output not in self.wide_outputs and not widened

    def need_gradient(self, args: Args) -> None:
        """Refuse a gradient that the op has not.

        Raises: ValueError: an operand requires grad, by name.
        """
        if self.differentiable:
            return
        named = zip(inspect.signature(self.build).parameters, args, strict=False)
        learning = (n for n, value in named if isinstance(value, Tensor) and value.requires_grad)
        name = next(learning, "inputs")  # else one inside a tuple
        raise ValueError(
            f"{self.name} has no gradient: {name} needs to require none "
            f"({name}.detach(), or torch.no_grad()), got a tensor that requires grad"
        )

    def tensors(self, args: Args) -> list[Tensor]:
        """Every tensor among the arguments."""
        return [a for a in args if isinstance(a, Tensor)]


def with_zero_gradient(outputs: Any, args: Args) -> Any:
    """Outputs of `empty`, made to depend on the arguments that want a gradient: theirs is zero."""
    learning = [a for a in args if isinstance(a, Tensor) and a.requires_grad]
    if not (learning and torch.is_grad_enabled()):
        return outputs
    if isinstance(outputs, tuple):
        return tuple(with_zero_gradient(out, args) for out in outputs)
    nothing = torch.stack([torch.atleast_1d(a)[:0].sum().to(outputs.dtype) for a in learning]).sum()
    return outputs + nothing


def output_like(*positions: int) -> Callable[[Args], tuple[OutputSpec, ...]]:
    """Outputs that have shape and dtype of the operands at these positions."""
    return lambda args: tuple(
        OutputSpec(tuple(args[p].shape), str(args[p].dtype).removeprefix("torch.")) for p in positions
    )


OPS: dict[str, Op] = {}


def register(op: Op) -> Op:
    """Add an op to the table of ops; a second op of one name is an error."""
    if op.name in OPS:
        raise ValueError(f"op {op.name!r} is already registered")
    OPS[op.name] = op
    return op


def _registering(make: Callable[P, Op]) -> Callable[P, Op]:
    return lambda *args, **fields: register(make(*args, **fields))


# An op by its fields, in the table of ops from then on.
define_op = _registering(Op)
