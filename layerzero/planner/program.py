"""A plan ready to run: one straight function over steps, made for arguments of one signature."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from layerzero.actors.device.local_device import LocalDevice
from layerzero.calls.blocking import blocking
from layerzero.ops.batching import concat_rows
from layerzero.ops.op import Op
from layerzero.planner.block import Block, Edge, map_tree
from layerzero.planner.choices import Choice
from layerzero.planner.fusions import JoinedWeights
from layerzero.planner.search import Solution
from layerzero.planner.values import PlacedBlock, PlacedOp, Slot, TensorFormat, dense_strides, format_of
from layerzero.selection.context import KernelLoadError
from layerzero.selection.dispatch import DispatchState
from layerzero.selection.plan import Plan
from layerzero.selection.record import Selection

Run = Callable[..., Any]


class HeldTensor:
    """What a plan made of weights ahead: joined, cast or dense.

    torch's version counter says whether a weight has changed; those of inference mode have none.
    """

    def __init__(self, sources: Sequence[Tensor], make: Callable[[], Tensor]) -> None:
        self.sources = tuple(sources)
        self._make = make
        self._watched = [source for source in sources if not source.is_inference()]
        self._versions = [source._version for source in self._watched]
        with torch.inference_mode(False), torch.no_grad():
            self.tensor = make()

    def refresh(self, *, always: bool = False) -> None:
        """Take over what the weights hold now, where one has changed or `always`."""
        versions = [source._version for source in self._watched]
        if (always or versions != self._versions) and self.own_bytes:
            with torch.inference_mode(False), torch.no_grad():
                self.tensor.copy_(self._make())
        self._versions = versions

    @property
    def own_bytes(self) -> int:
        """What it takes beyond the weights; nothing where they lie side by side already."""
        where = self.tensor.untyped_storage().data_ptr()
        shared = any(source.untyped_storage().data_ptr() == where for source in self.sources)
        return 0 if shared else self.tensor.numel() * self.tensor.element_size()


class HeldTensors:
    """What the programs of one block made of its weights; programs that need the same share it."""

    def __init__(self) -> None:
        self._by_key: WeakValueDictionary[Any, HeldTensor] = WeakValueDictionary()

    def hold(self, sources: Sequence[Tensor], formats: Any, make: Callable[[], Tensor]) -> HeldTensor:
        """What `make` gives of these weights in these formats; made once."""
        where = ((s.data_ptr(), s.shape, s.stride(), s.dtype, s.device) for s in sources)
        key = (*where, formats)
        held_tensor = self._by_key.get(key)
        if held_tensor is None:
            held_tensor = self._by_key[key] = HeldTensor(sources, make)
        return held_tensor


class Program:
    """The compiled steps of a plan: `run(*tensors)` gives the block's outputs as a list.

    `source` is its text; `held` is what was made of weights ahead.
    """

    def __init__(
        self,
        block: PlacedBlock,
        device: LocalDevice,
        state: DispatchState,
        solution: Solution,
        weights: HeldTensors,
    ) -> None:
        writer = _Writer(block, device, state, weights)
        for alternative in solution.alternatives:
            writer.add(alternative.payload, dict(alternative.produces))
        self.source, self._names = writer.finish()
        self.held = tuple(writer.held)
        self._plans = writer.plans
        exec(compile(self.source, "<plan>", "exec"), self._names)
        self.run: Run = self._first_run
        self.is_for: Callable[..., bool] = _matcher([block.values[value].fake for value in block.inputs])

    def _first_run(self, *tensors: Tensor) -> list[Tensor]:
        """The first run, whose outputs are compared with what each op promises; later ones are not."""
        outputs: list[Tensor] = self._names["run"](*tensors)
        self._names.update({name: plan.call for name, plan in self._plans.items()})
        self.run = self._names["run"]
        return outputs


class _Writer:
    """Writes the text of a program, a line a step or conversion."""

    def __init__(
        self, block: PlacedBlock, device: LocalDevice, state: DispatchState, weights: HeldTensors
    ) -> None:
        self._block, self._device, self._state, self._weights = block, device, state, weights
        self._lines: list[tuple[str, ...]] = []
        self._reads: list[set[str]] = []
        self._names: dict[str, Any] = {}
        self._formats = {place: format_of(value.fake) for place, value in enumerate(block.values)}
        self._produced: set[int] = set()
        self._converted: dict[tuple[int, TensorFormat], str] = {}
        self.held: list[HeldTensor] = []
        self.plans: dict[str, Plan] = {}

    def add(self, choice: Choice, produced: Mapping[int, TensorFormat]) -> None:
        """One step, behind the conversions that it needs."""
        if choice.op is None or choice.full is None or choice.selection is None:
            placed = self._block.ops[next(iter(choice.covers))]
            run = _torch_function(placed.written.target) if placed.op is None else blocking(placed.op)
            name = self._name("f", run)
            arguments = [self._written(leaf, choice) for leaf in placed.args]
            arguments += [f"{name}={self._written(leaf, choice)}" for name, leaf in placed.kwargs.items()]
            is_many = _returns_many(placed)
        else:
            name = self._kernel(choice.op, choice.selection)
            arguments = [self._guarded(choice, place, leaf) for place, leaf in enumerate(choice.full)]
            is_many = max(take.output for take in choice.gives.values()) > 0
            is_many = is_many or (not choice.kind and len(choice.gives) > 1)
        self._formats.update(produced)
        self._converted = {key: name for key, name in self._converted.items() if key[0] not in produced}
        self._produced |= choice.gives.keys()
        targets, tail = self._targets(choice, is_many), "," if len(arguments) == 1 else ""
        operands = ", ".join(arguments)
        if name in self.plans:
            recovered = f"{targets} = recover_{name}(({operands}{tail}), error)"
            self._write(f"try: {targets} = {name}({operands})", f"except Exception as error: {recovered}")
        else:
            self._write(f"{targets} = {name}({operands})")
        sizes = [take.size for take in choice.gives.values() if take.size]
        if sizes:
            values = ", ".join(f"v{value}" for value in choice.gives)
            self._write(f"{values}, = r.split_with_sizes({sizes}, -1)")

    def finish(self) -> tuple[str, dict[str, Any]]:
        """The text of the program, and what it names."""
        outputs = [self._slot(v, format_of(self._block.values[v].fake)) for v in self._block.outputs]
        self._write(f"return [{', '.join(outputs)}]")
        inputs = ", ".join(f"v{value}" for value in self._block.inputs)
        # A value behind its last reader is let go, as it would be op by op.
        later: set[str] = set()
        reverse: list[str] = []
        for written, reads in zip(reversed(self._lines), reversed(self._reads), strict=True):
            unread = sorted(reads - later)
            if unread and not written[0].startswith("return"):
                reverse.append(f"del {', '.join(unread)}")
            reverse += reversed(written)
            later |= reads
        body = "".join(f"    {line}\n" for line in reversed(reverse))
        return f"def run({inputs}):\n{body}", self._names

    def _kernel(self, op: Op, selection: Selection) -> str:
        """The name of a step's kernel in the program, with what answers where it raises."""
        device, state = self._device, self._state
        terms = state.agreed_terms
        make_plan = device.compiler.compile if terms is None else device.compiler.compile_agreed
        try:
            plan = make_plan(op, selection)
        except KernelLoadError:  # what the op alone takes, until the block is planned anew
            plan = device.table(op, state).plan_for(selection.request)
        plan = plan.with_output_check(selection.request)
        name = self._name("f", plan.call)
        self.plans[name] = plan
        self._names[f"recover_{name}"] = lambda args, error: device.recover(plan, args, error, state)[0]
        if terms is not None:
            self._names["_record"] = terms.record_call
            self._write(f"_record({plan.kernel!r})")
        return name

    def _targets(self, choice: Choice, is_many: bool) -> str:
        """The left side of a call: a name for each output."""
        if any(take.size for take in choice.gives.values()):
            return "r"
        by_output = {take.output: f"v{value}" for value, take in choice.gives.items()}
        if not by_output:
            return "_"
        if not is_many:
            return by_output[0]
        return ", ".join(by_output.get(output, "_") for output in range(max(by_output) + 1)) + ", *_"

    def _write(self, *lines: str) -> None:
        self._lines.append(lines)
        self._reads.append(set(_VARIABLE.findall(lines[0])))

    def _name(self, letter: str, value: Any) -> str:
        name = f"{letter}{len(self._names)}"
        self._names[name] = value
        return name

    def _guarded(self, choice: Choice, position: int, leaf: Any) -> str:
        """An argument of a kernel; dense where the kernel relies on it and another kernel wrote it."""
        written = self._written(leaf, choice)
        assert choice.op is not None and choice.selection is not None
        kernel = self._device.registry.get(choice.selection.kernel)
        relies = kernel is not None and (kernel.capability.contiguous or kernel.capability.last_stride1)
        inside = any(t.kind == "contiguous" for t in choice.selection.transforms)
        if not relies or inside or not isinstance(leaf, Slot) or position not in choice.op.operands:
            return written
        form = choice.formats[leaf.value]
        is_dense = form.strides == dense_strides(self._block.values[leaf.value].fake.shape)
        if not is_dense or leaf.value not in self._produced:
            return written
        return f"{written} if {written}.is_contiguous() else {written}.contiguous()"

    def _written(self, leaf: Any, choice: Choice) -> str:
        """A tree of arguments as text."""
        if isinstance(leaf, Slot):
            return self._slot(leaf.value, choice.formats.get(leaf.value))
        if isinstance(leaf, JoinedWeights):
            return self._joined(leaf, choice)
        if isinstance(leaf, list):
            return f"[{', '.join(self._written(each, choice) for each in leaf)}]"
        if leaf is None or isinstance(leaf, bool | int | str):
            return repr(leaf)
        return self._name("k", leaf)

    def _slot(self, value: int, form: TensorFormat | None) -> str:
        """A value in a format: as it is, or converted once for all who read it so."""
        form = form or self._formats[value]
        name = self._converted.get((value, form))
        if name is None:
            name = self._converted[value, form] = self._in_format(value, form)
        return name

    def _in_format(self, value: int, form: TensorFormat) -> str:
        """A name for a value in a format that it has not been read in."""
        before, constant = self._formats[value], self._block.values[value].constant
        if form == before:
            return f"v{value}" if constant is None else self._name("w", constant)
        convert = converter(before, form, self._block.values[value].fake)
        held = self._block.held(value)
        if held is not None:
            return self._hold([held], form, lambda: convert(held))
        function = self._name("c", convert)
        name = f"v{value}_{function[1:]}"
        self._write(f"{name} = {function}({self._slot(value, before)})")
        return name

    def _joined(self, leaf: JoinedWeights, choice: Choice) -> str:
        parts: list[tuple[Tensor, Run]] = []
        for value in leaf.values:
            constant = self._block.values[value].constant
            assert constant is not None
            form, fake = choice.formats.get(value, self._formats[value]), self._block.values[value].fake
            parts.append((constant, converter(self._formats[value], form, fake)))
        formats = tuple(choice.formats.get(value) for value in leaf.values)
        sources = [part for part, _ in parts]
        return self._hold(sources, formats, lambda: concat_rows([make(part) for part, make in parts]))

    def _hold(self, sources: list[Tensor], formats: Any, make: Callable[[], Tensor]) -> str:
        held_tensor = self._weights.hold(sources, formats, make)
        self.held.append(held_tensor)
        return self._name("w", held_tensor.tensor)


def run_op_by_op(block: Block, tensors: Sequence[Any]) -> list[Any]:
    """A block's outputs without a plan: its ops in their order, each chosen as it is called."""
    values = {Edge(name): tensor for name, tensor in zip(block.inputs, tensors, strict=True)}
    fill: Run = lambda leaf: values[leaf] if isinstance(leaf, Edge) else leaf  # noqa: E731
    for op in block.ops:
        run = blocking(op.target) if op.is_ours else op.target
        results = run(*map_tree(op.args, fill), **map_tree(op.kwargs, fill))
        each = results if isinstance(results, tuple | list) else (results,)
        values.update({Edge(op.name, output): result for output, result in enumerate(each)})
    return [values[edge] for edge in block.edges_out]


_VARIABLE = re.compile(r"\bv\d+(?:_\d+)?\b")


# Operators of torch that have a faster function of the same name.
_FUNCTIONS = frozenset(
    {
        "add", "cat", "chunk", "div", "flatten", "gelu", "mul", "permute", "relu", "reshape", "sigmoid",
        "silu", "split", "squeeze", "stack", "sub", "transpose", "unflatten", "unsqueeze",
    }
)  # fmt: skip


def _matcher(fakes: Sequence[Tensor]) -> Callable[..., bool]:
    """A function that says whether tensors are like these, in everything that a plan was made for."""
    names: dict[str, Any] = {}
    tests: list[str] = []
    for place, fake in enumerate(fakes):
        device = fake.device.index if fake.device.type != "cpu" else -1
        names |= {f"shape{place}": fake.shape, f"dtype{place}": fake.dtype, f"strides{place}": fake.stride()}
        strides = "is_contiguous()" if fake.is_contiguous() else f"stride() == strides{place}"
        tests += [
            f"v{place}.shape == shape{place}",
            f"v{place}.dtype is dtype{place}",
            f"v{place}.get_device() == {device}",
            f"v{place}.requires_grad is {fake.requires_grad}",
            f"v{place}.{strides}",
        ]
    arguments = ", ".join(f"v{place}" for place in range(len(fakes)))
    exec(f"def is_for({arguments}): return {' and '.join(tests) or True}", names)
    return names["is_for"]  # type: ignore[no-any-return]


def _torch_function(target: Any) -> Run:
    """What calls an operator of torch with the least around it."""
    space, name = target._schema.name.split("::")
    if space == "aten" and name in _FUNCTIONS:
        for home in (torch, torch._C._nn):  # pyright: ignore[reportAttributeAccessIssue]
            if hasattr(home, name):
                return getattr(home, name)  # type: ignore[no-any-return]
    return target._op  # type: ignore[no-any-return]


def _returns_many(placed: PlacedOp) -> bool:
    if placed.op is not None:
        return len(placed.outputs) > 1
    returns = placed.written.target._schema.returns
    return len(returns) != 1 or isinstance(returns[0].type, torch.ListType)


def make_dense(value: Tensor) -> Tensor:
    """A tensor as it is where it is dense, else a copy that is."""
    return value if value.is_contiguous() else value.contiguous()


def converter(before: TensorFormat, after: TensorFormat, fake: Tensor) -> Run:
    """What brings a value from one format into another."""
    dtype = None if before.dtype == after.dtype else getattr(torch, after.dtype)
    if before == after:
        return lambda value: value
    if after.strides == dense_strides(fake.shape):
        return lambda value: make_dense(value if dtype is None else value.to(dtype))

    def swap(value: Tensor) -> Tensor:
        cast = value if dtype is None else value.to(dtype)
        return make_dense(cast.transpose(1, 2)).transpose(1, 2)

    return swap
