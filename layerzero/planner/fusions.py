"""What may be fused: for each op of the library that does the work of several, where a block holds those.

A fusion is a call of one op in the place of several. Weights that the block holds may be joined for it.
"""

# Values whose shape the code has checked, or that a table names.
# pyright: reportAssignmentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from layerzero.ops import table
from layerzero.ops.op import Args, Op
from layerzero.planner.values import PlacedBlock, PlacedOp, Slot

# Every subset of so many products of one operand is looked at; of more, all of them together.
MAX_SUBSETS = 4
_GATES = {"aten.silu.default": "swiglu", "aten.relu.default": "reglu"}
_PLAIN = {"aten.silu.default": "silu", "aten.relu.default": "relu"}
_GELU = "aten.gelu.default"


class JoinedWeights(NamedTuple):
    """Weights of the block, one above the other in one tensor."""

    values: tuple[int, ...]


class OutputSlice(NamedTuple):
    """A part of a fused op's output: `size` columns from `start`, or all of it where `size` is 0."""

    output: int
    start: int = 0
    size: int = 0


@dataclass(frozen=True, slots=True)
class Fusion:
    """One op in the place of `covers`: its arguments, and where each value that others read comes from.

    `kind` is empty where it is the one op of `covers` itself.
    """

    kind: str
    covers: frozenset[int]
    op: Op
    full: tuple[Any, ...]
    gives: Mapping[int, OutputSlice]


class _Reading:
    """A placed block, asked for what produces and reads a value."""

    def __init__(self, block: PlacedBlock, can_join: bool) -> None:
        self.block = block
        self.can_join = can_join
        self.producer = {value: place for place, op in enumerate(block.ops) for value in op.outputs}
        self.readers: dict[int, set[int]] = {}
        for place, op in enumerate(block.ops):
            for value in op.reads():
                self.readers.setdefault(value, set()).add(place)

    def made_by(self, leaf: Any, name: str) -> int | None:
        """The position of the op of that name that gives a slot's value; None where it is none."""
        place = self.producer.get(leaf.value) if isinstance(leaf, Slot) else None
        return place if place is not None and self.block.ops[place].written.op == name else None

    def is_closed(self, fusion: Fusion) -> bool:
        """Whether no op outside, and no caller, reads a value that the fused op no longer gives."""
        values = {value for place in fusion.covers for value in self.block.ops[place].outputs}
        hidden = values - fusion.gives.keys()
        read_inside = all(self.readers.get(value, set()) <= fusion.covers for value in hidden)
        return read_inside and hidden.isdisjoint(self.block.outputs)

    def fake(self, leaf: Any) -> Tensor:
        fake: Tensor = self.block.values[leaf.value].fake
        return fake

    def is_held(self, leaf: Any) -> bool:
        """Whether a slot is a tensor that the block holds, and that may be joined with others."""
        return self.can_join and isinstance(leaf, Slot) and self.block.held(leaf.value) is not None

    def each(self, *names: str) -> Iterator[tuple[int, PlacedOp, Args]]:
        """The ops of these names, with positions and arguments; not those that ask for a kernel by name."""
        for place, op in enumerate(self.block.ops):
            if op.written.op in names and "backend" not in op.written.kwargs:
                yield place, op, op.full or ()


def find_fusions(block: PlacedBlock, *, can_join: bool) -> list[Fusion]:
    """Every fusion that a block allows; `can_join` says whether weights may be joined ahead."""
    reading = _Reading(block, can_join)
    fusions = [fusion for match in _MATCHES for fusion in match(reading)]
    backends = {place for place, op in enumerate(block.ops) if "backend" in op.written.kwargs}
    return [fusion for fusion in fusions if not fusion.covers & backends and reading.is_closed(fusion)]


def _in_place_of(covers: AbstractSet[int], kind: str, op: str, full: Args, last: PlacedOp) -> Fusion:
    """A fusion whose one output is the first of the op `last`."""
    return Fusion(kind, frozenset(covers), table.get(op), full, {last.outputs[0]: OutputSlice(0)})


def _sum(reading: _Reading, leaf: Any) -> int | None:
    """The position of a plain sum of two tensors of one shape and dtype that gives a slot's value."""
    place = reading.made_by(leaf, "aten.add.Tensor")
    if place is None:
        return None
    op = reading.block.ops[place]
    if op.kwargs.get("alpha", 1) != 1 or not all(isinstance(term, Slot) for term in op.args):
        return None
    total, *terms = (reading.fake(term) for term in (leaf, *op.args))
    same = all(term.shape == total.shape and term.dtype == total.dtype for term in terms)
    return place if same and len(terms) == 2 else None


def _add_norm(reading: _Reading) -> Iterator[Fusion]:
    """A residual sum with the norm of it."""
    for place, op, (x, *rest) in reading.each("rms_norm", "layer_norm"):
        total = _sum(reading, x)
        if total is not None:
            summed = reading.block.ops[total]
            yield Fusion(
                "add+norm", frozenset({total, place}), table.get(f"add_{op.written.op}"),
                (*summed.args, *rest), {op.outputs[0]: OutputSlice(0), summed.outputs[0]: OutputSlice(1)},
            )  # fmt: skip


def _norm_quantize(reading: _Reading) -> Iterator[Fusion]:
    """A residual sum, its norm and the rounding of that to eight bits."""
    fused = table.get("add_rms_norm_quantize")
    for place, op, (x, form, granularity, group_size, *scales) in reading.each("quantize"):
        if granularity == "tensor" or any(scale is not None for scale in scales):
            continue
        rounding = (form, granularity, group_size)
        norm = reading.made_by(x, "add_rms_norm")
        if norm is not None:
            normed = reading.block.ops[norm]
            assert normed.full is not None
            covers, head, total = frozenset({norm, place}), normed.full, normed.outputs[1]
        else:
            norm = reading.made_by(x, "rms_norm")
            normed = reading.block.ops[norm] if norm is not None else op
            addition = _sum(reading, normed.full[0]) if norm is not None and normed.full else None
            if norm is None or addition is None or normed.full is None:
                continue
            summed = reading.block.ops[addition]
            covers, total = frozenset({addition, norm, place}), summed.outputs[0]
            head = (*summed.args, *normed.full[1:])
        gives = {op.outputs[0]: OutputSlice(0), op.outputs[1]: OutputSlice(1), total: OutputSlice(2)}
        yield Fusion("add+norm+quantize", covers, fused, (*head, *rounding), gives)


def _rope_append(reading: _Reading) -> Iterator[Fusion]:
    """A rotation with the write of the turned keys, and of values, into pages of numbers."""
    for place, _, (k, v, k_cache, v_cache, slot_mapping, layout, *scales) in reading.each("append_kv"):
        rotation = reading.made_by(k, "rope")
        if rotation is None or any(scale is not None for scale in scales):
            continue
        turned = reading.block.ops[rotation]
        q, keys, *angles, interleaved, xpos_scale = turned.full or ()
        if k.value != turned.outputs[1] or xpos_scale is not None:
            continue
        full = (q, keys, v, *angles, k_cache, v_cache, slot_mapping, interleaved, layout)
        yield _in_place_of({rotation, place}, "rope+append", "rope_append_kv", full, turned)


def _linears(reading: _Reading) -> Iterator[list[tuple[int, PlacedOp]]]:
    """Products of one operand with weights of one dtype that the block holds, with biases or without."""
    groups: dict[Any, list[tuple[int, PlacedOp]]] = {}
    for place, op, (x, weight, bias) in reading.each("linear"):
        if reading.is_held(weight) and (bias is None or reading.is_held(bias)):
            kinds = tuple(None if leaf is None else reading.fake(leaf).dtype for leaf in (weight, bias))
            groups.setdefault((x, kinds), []).append((place, op))
    yield from (group for group in groups.values() if len(group) > 1)


def _joined_linears(reading: _Reading) -> Iterator[Fusion]:
    """Products of one operand as one product: queries, keys and values, or gate and up."""
    for group in _linears(reading):
        sizes = range(2, len(group) + 1) if len(group) <= MAX_SUBSETS else (len(group),)
        for part in itertools.chain.from_iterable(itertools.combinations(group, size) for size in sizes):
            gives, start = {}, 0
            for _, op in part:
                assert op.full is not None
                width = reading.fake(op.full[1]).shape[0]
                gives[op.outputs[0]] = OutputSlice(0, start, width)
                start += width
            full = (part[0][1].full or ())[0], _joined(part, 1), _joined(part, 2)
            yield Fusion("linears", frozenset(place for place, _ in part), table.get("linear"), full, gives)


def _norm_linear(reading: _Reading) -> Iterator[Fusion]:
    """A norm with the product of it, or with all of its products as one."""
    products = [
        (frozenset({place}), full, {op.outputs[0]: OutputSlice(0)})
        for place, op, full in reading.each("linear")
    ]
    products += [(joined.covers, joined.full, dict(joined.gives)) for joined in _joined_linears(reading)]
    for covers, (x, weight, bias), gives in products:
        norm = reading.made_by(x, "rms_norm")
        if norm is not None:
            rows, norm_weight, eps = reading.block.ops[norm].full or ()
            full = (rows, norm_weight, weight, bias, eps)
            yield Fusion("norm+linear", covers | {norm}, table.get("rms_norm_linear"), full, gives)


def _joined(part: tuple[tuple[int, PlacedOp], ...], argument: int) -> JoinedWeights | None:
    """An argument of several ops, one above the other; None where they have none."""
    leaves = [(op.full or ())[argument] for _, op in part]
    return None if leaves[0] is None else JoinedWeights(tuple(leaf.value for leaf in leaves))


def _activation(reading: _Reading, leaf: Any, kinds: Mapping[str, str], gelu: str) -> tuple[int, str] | None:
    """The position of an activation that gives a slot's value, and the word of `mlp` for it."""
    for name, word in kinds.items():
        place = reading.made_by(leaf, name)
        if place is not None:
            return place, word
    place = reading.made_by(leaf, _GELU)
    if place is None:
        return None
    approximate = reading.block.ops[place].kwargs.get("approximate", "none")
    return place, gelu if approximate == "none" else f"{gelu}_tanh"


def _gated_mlp(reading: _Reading) -> Iterator[Fusion]:
    """down(activation(gate(x)) * up(x)), gate and up as two products or as the halves of one."""
    for place, down, (hidden, w_down, b_down) in reading.each("linear"):
        product = reading.made_by(hidden, "aten.mul.Tensor")
        if product is None:
            continue
        terms = reading.block.ops[product].args
        for first, second in (terms, terms[::-1]):
            activation = _activation(reading, first, _GATES, "geglu")
            if activation is None:
                continue
            inner, word = activation
            gate = reading.block.ops[inner].args[0]
            up = _up_weights(reading, gate, second)
            if up is not None:
                covers, x, weight, bias = up
                full = (x, weight, w_down, bias, b_down, word)
                yield _in_place_of(covers | {inner, product, place}, "gate+up+activation", "mlp", full, down)


def _up_weights(reading: _Reading, gate: Any, up: Any) -> tuple[frozenset[int], Any, Any, Any] | None:
    """What gives gate and up: the ops, their operand, the gate's rows above the other's, and the bias."""
    first, second = (reading.made_by(leaf, "linear") for leaf in (gate, up))
    if first is not None and second is not None and first != second:
        pair = tuple((place, reading.block.ops[place]) for place in (first, second))
        one, other = ((op.full or ()) for _, op in pair)
        alike = one[0] == other[0] and (one[2] is None) == (other[2] is None)
        equal = reading.fake(one[1]).shape == reading.fake(other[1]).shape
        can_join = all(leaf is None or reading.is_held(leaf) for leaf in (*one[1:], *other[1:]))
        if alike and equal and can_join:
            return frozenset({first, second}), one[0], _joined(pair, 1), _joined(pair, 2)
        return None
    halves = next(
        (place for name in ("aten.chunk.default", "aten.split.Tensor")
         if (place := reading.made_by(gate, name)) is not None and place == reading.made_by(up, name)), None,
    )  # fmt: skip
    if halves is None or tuple(reading.block.ops[halves].outputs) != (gate.value, up.value):
        return None
    source = reading.block.ops[halves].args[0]
    both = reading.made_by(source, "linear")
    width = reading.fake(source).shape[-1] if both is not None else 0
    if both is None or any(reading.fake(leaf).shape[-1] * 2 != width for leaf in (gate, up)):
        return None
    x, weight, bias = reading.block.ops[both].full or ()
    return frozenset({both, halves}), x, weight, bias


def _plain_mlp(reading: _Reading) -> Iterator[Fusion]:
    """down(activation(up(x)))."""
    for place, down, (hidden, w_down, b_down) in reading.each("linear"):
        activation = _activation(reading, hidden, _PLAIN, "gelu")
        if activation is None:
            continue
        inner, word = activation
        up = reading.made_by(reading.block.ops[inner].args[0], "linear")
        if up is None:
            continue
        x, weight, bias = reading.block.ops[up].full or ()
        if reading.fake(w_down).shape[0] == reading.fake(weight).shape[1]:
            full = (x, weight, w_down, bias, b_down, word)
            yield _in_place_of({up, inner, place}, "mlp", "mlp", full, down)


def _linear_loss(reading: _Reading) -> Iterator[Fusion]:
    """The last product and its loss."""
    for place, op, (logits, target, class_weights, *rest) in reading.each("cross_entropy"):
        product = reading.made_by(logits, "linear")
        if product is None or class_weights is not None:
            continue
        x, weight, bias = reading.block.ops[product].full or ()
        full = (x, weight, target, bias, *rest)
        yield _in_place_of({product, place}, "linear+loss", "linear_cross_entropy", full, op)


_MATCHES = (
    _add_norm, _norm_quantize, _rope_append, _joined_linears, _norm_linear, _gated_mlp, _plain_mlp,
    _linear_loss,
)  # fmt: skip
