"""Verifying drafted tokens: `verify_chain` and `verify_tree`.

A draft model proposes, the target model's distributions decide: a token x drafted with probability q(x)
stays with probability min(1, p(x) / q(x)); at the first that goes, the next token is drawn from what p has
more than q. What comes out is distributed as the target alone would have drawn it, whatever the draft was.
Every row has its own seed, and its draws do not depend on which rows are in the same batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from layerzero.ops import checks
from layerzero.ops.describe import describe, estimate
from layerzero.ops.op import Args, define_op
from layerzero.ops.sampling.batching import SamplingBatching
from layerzero.ops.sampling.draw import GOLDEN, Count, new_seed, row_seeds, sample_from_weights, uniform
from layerzero.ops.signature import SignedCall, op_signature, type_key
from layerzero.spec.call_spec import CallSpec, OutputSpec

MAX_DEPTH = 1 << 12


def _as_tuple(parents: Any) -> Any:
    """A list as a tuple, which a signature can hold."""
    return tuple(parents) if isinstance(parents, list) else parents


@op_signature(default={"seed": new_seed}, key={"seed": type_key, "offset": type_key})
def verify_chain(
    draft_probs: Tensor,
    draft_tokens: Tensor,
    target_probs: Tensor,
    *,
    seed: Count | None = None,
    offset: Count = 0,
) -> SignedCall:
    """Keep the drafted tokens that the target agrees with, and draw the one after them.

    Args: draft_probs (B, K, V), what each drafted token was drawn from; draft_tokens (B, K) integers;
        target_probs (B, K + 1, V), the target's distribution at each place and after the last; any one float
        dtype, rows that sum to 1. seed and offset as in `sample`: the same pair decides the same.
    Returns: tokens (B, K + 1) int64: those that stay, the one drawn after them, then -1; accepted (B,) int64,
        how many stay.
    Raises: ValueError, TypeError: an argument does not fit, by name; on the CPU also ids out of range and
        probabilities below 0.
    Source: Leviathan, Kalman and Matias, ICML 2023; Chen et al., arXiv 2302.01318.
    """
    raise NotImplementedError


@op_signature(
    default={"seed": new_seed}, convert={"parents": _as_tuple}, key={"seed": type_key, "offset": type_key}
)
def verify_tree(
    draft_probs: Tensor,
    draft_tokens: Tensor,
    target_probs: Tensor,
    parents: Sequence[int],
    *,
    seed: Count | None = None,
    offset: Count = 0,
) -> SignedCall:
    """Walk a tree of drafted tokens as far as the target agrees, and draw the token after it.

    Node 0 is the last token that is certain; node n > 0 continues node parents[n] < n. Children of one node
    are drafts drawn independently from one distribution, tried in the order of their numbers.
    Args: draft_probs (B, N, V), what the children of each node were drawn from (rows of leaves are not read);
        draft_tokens (B, N) integers (column 0 is not read); target_probs (B, N, V), the target's distribution
        after each node; parents, N integers, parents[0] == -1.
    Returns: tokens (B, D + 1) int64 with D the tree's depth: those that stay, the one drawn after, then -1;
        nodes (B, D) int64, the path that stays, then -1; accepted (B,) int64, its length.
    Raises: ValueError, TypeError: an argument does not fit, by name.
    Source: Miao et al., ASPLOS 2024 (SpecInfer), multi-step speculative sampling.
    """
    raise NotImplementedError


def tree_mask(parents: Sequence[int], device: torch.device | str = "cpu") -> Tensor:
    """Which nodes of a draft tree a node attends to: (N, N) bool, its ancestors and itself.

    Raises: ValueError: `parents` is no tree.

    Example:
        >>> import layerzero as lz
        >>> lz.tree_mask([-1, 0, 0]).int().tolist()
        [[1, 0, 0], [1, 1, 0], [1, 0, 1]]
    """
    if not isinstance(parents, Iterable):
        raise TypeError(f"parents needs a sequence of ints, got {type(parents).__name__}")
    parents = tuple(parents)
    _need_tree(parents)
    mask = torch.eye(len(parents), dtype=torch.bool, device="cpu")
    for node, parent in enumerate(parents):
        if parent >= 0:
            mask[node] |= mask[parent]
    return mask.to(device)


# -- checks ---------------------------------------------------------------------------------------------


def _need_tree(parents: Any) -> None:
    if not isinstance(parents, tuple) or not all(type(p) is int for p in parents):
        raise TypeError(f"parents needs a sequence of ints, got {parents!r:.80}")
    if not parents or parents[0] != -1:
        raise ValueError(f"parents needs -1 for node 0, got {parents[:1]}")
    for node, parent in enumerate(parents[1:], 1):
        if not 0 <= parent < node:
            raise ValueError(f"parents needs 0 to {node - 1} for node {node}, got {parent}")


def _check(op: str, args: Args) -> CallSpec:
    draft, tokens, target, *_, seed, offset = args
    for name, probs in (("draft_probs", draft), ("target_probs", target)):
        checks.need_rows(name, probs, rank=3)
    checks.need_index("draft_tokens", tokens, rank=2)
    if target.dtype != draft.dtype:
        raise TypeError(f"target_probs needs {draft.dtype} like draft_probs, got {target.dtype}")
    rows, places, vocab = draft.shape
    bonus = 1 if op == "verify_chain" else 0
    beside = f" beside draft_probs {tuple(draft.shape)}"
    checks.need_shape("target_probs", target, (rows, places + bonus, vocab), beside)
    checks.need_shape("draft_tokens", tokens, (rows, places))
    if vocab < 1 or places > MAX_DEPTH:
        raise ValueError(
            f"draft_probs needs a vocabulary and at most {MAX_DEPTH} places, got {tuple(draft.shape)}"
        )
    checks.need_same_device("draft_probs", draft, draft_tokens=tokens, target_probs=target)
    checks.need_count("seed", seed, draft, beside="draft_probs")
    checks.need_count("offset", offset, draft, beside="draft_probs")
    dims, features = {"N": rows, "S": places, "V": vocab}, {"seed_per_row": isinstance(seed, Tensor)}
    return describe(op, [draft, target], dims, features)


def _check_tree(args: Args) -> CallSpec:
    _need_tree(args[3])
    spec = _check("verify_tree", args)
    checks.need_like("parents", "{} nodes", len(args[3]), args[0].shape[1], "draft_probs")
    return spec


def _validate_values(args: Args) -> Args:
    """Tokens in the vocabulary, as a copy; probabilities that are some."""
    checked: Args | None = checks.native_check("proposals", args)
    return _looked_through(args) if checked is None else checked


def _looked_through(args: Args) -> Args:
    draft, tokens, target = args[:3]
    if not draft.shape[0] or not all(map(checks.can_read_values, (draft, tokens, target))):
        return args
    private_tokens = checks.private_copy(tokens)
    start = 0 if not isinstance(args[3], tuple) else 1  # a tree's root was not drafted
    checks.ids_in_range("draft_tokens", private_tokens[:, start:], draft.shape[2], "the vocabulary")
    for name, probs in (("draft_probs", draft), ("target_probs", target)):
        # The least of some numbers is NaN where any of them is.
        if probs.numel() and not float(probs.detach().amin()) >= 0:
            raise ValueError(f"{name} needs probabilities of at least 0, got a negative one or NaN")
    return draft, private_tokens, target, *args[3:]


# -- references -----------------------------------------------------------------------------------------


def verify_chain_reference(
    draft_probs: Tensor, draft_tokens: Tensor, target_probs: Tensor, seed: Count, offset: Count
) -> tuple[Tensor, Tensor]:
    """All places at once: one comparison a drafted token, one draw a row."""
    rows, places, vocab = draft_probs.shape
    drafted = draft_tokens.long()
    index = drafted.unsqueeze(-1)
    q = draft_probs.gather(-1, index).squeeze(-1).double()
    p = target_probs[:, :places].gather(-1, index).squeeze(-1).double()
    seeds = row_seeds(seed, draft_probs)
    is_accepted = _points(seeds, offset, places) * q < p
    accepted = is_accepted.long().cumprod(-1).sum(-1)
    next_index = accepted.view(-1, 1, 1).expand(-1, 1, vocab)
    next_probs = target_probs.gather(1, next_index).squeeze(1).double()
    # Behind the last place nothing was drafted: what is left of the target's distribution is all of it.
    padded = (
        torch.cat([draft_probs, torch.zeros_like(draft_probs[:, :1])], 1)
        if places
        else next_probs.new_zeros(rows, 1, vocab)
    )
    residual = (next_probs - padded.gather(1, next_index).squeeze(1).double()).clamp_min(0)
    drawn = _sample_residual(residual, next_probs, seeds, offset, places)
    place = torch.arange(places + 1, device=drafted.device)
    behind = torch.cat([drafted, drafted.new_full((rows, 1), -1)], 1)
    count = accepted.unsqueeze(-1)
    tokens = torch.where(place < count, behind, torch.where(place == count, drawn.unsqueeze(-1), -1))
    return tokens, accepted


def verify_tree_reference(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    """One pass over the nodes, all rows side by side: a row tries a node if it is at its parent."""
    draft_probs, draft_tokens, target_probs, parents, seed, offset = args
    rows, nodes = draft_probs.shape[:2]
    depth = tree_depth(parents)
    device = draft_probs.device
    seeds = row_seeds(seed, draft_probs)
    points = _points(seeds, offset, nodes)
    drafted = draft_tokens.long()
    current_node = torch.zeros(rows, dtype=torch.int64, device=device)  # the node that a row is at
    accepted = torch.zeros_like(current_node)
    tokens = torch.full((rows, depth + 1), -1, dtype=torch.int64, device=device)
    path = torch.full((rows, depth), -1, dtype=torch.int64, device=device)
    p = target_probs[:, 0].double()
    for node in range(1, nodes):
        q = draft_probs[:, parents[node]].double()
        token = drafted[:, node : node + 1]
        tried = current_node == parents[node]
        is_accepted = points[:, node] * q.gather(-1, token).squeeze(-1) < p.gather(-1, token).squeeze(-1)
        accepted_now, rejected_now = tried & is_accepted, tried & ~is_accepted
        rest = (p - q).clamp_min(0)
        total = rest.sum(-1, keepdim=True)
        rest = torch.where(total > 0, rest / total, p)
        p = torch.where(rejected_now.unsqueeze(-1), rest, p)
        p = torch.where(accepted_now.unsqueeze(-1), target_probs[:, node].double(), p)
        place = torch.where(accepted_now, accepted, depth).unsqueeze(-1)
        tokens = tokens.scatter(-1, place, torch.where(accepted_now.unsqueeze(-1), token, tokens[:, depth:]))
        if depth:
            slot = place.clamp_max(depth - 1)
            path = path.scatter(
                -1, slot, torch.where(accepted_now.unsqueeze(-1), node, path.gather(-1, slot))
            )
        current_node = torch.where(accepted_now, node, current_node)
        accepted = accepted + accepted_now
    drawn = _sample_residual(p, p, seeds, offset, nodes)
    return tokens.scatter(-1, accepted.unsqueeze(-1), drawn.unsqueeze(-1)), path, accepted


def tree_depth(parents: Sequence[int]) -> int:
    """The longest path below the root, in nodes."""
    depths: list[int] = []
    for parent in parents:
        depths.append(0 if parent < 0 else depths[parent] + 1)
    return max(depths)


def _points(seeds: Tensor, offset: Count, places: int) -> Tensor:
    """One number in [0, 1) for each row and place (B, places)."""
    streams = [uniform(_stream(seeds, place), offset) for place in range(places)]
    return torch.stack(streams, -1) if streams else seeds.new_zeros((len(seeds), 0), dtype=torch.float64)


def _stream(seeds: Tensor, place: int) -> Tensor:
    """The seeds of a place: rows and places draw apart from each other, and from `sample`."""
    mixed: Tensor = (seeds ^ ((place + 1) * 0x2545F4914F6CDD1D % (1 << 63))) * GOLDEN
    return mixed


def _sample_residual(residual: Tensor, probs: Tensor, seeds: Tensor, offset: Count, place: int) -> Tensor:
    """A token of each row by the weights `left` (B, V), or `whole` where rounding left nothing."""
    weighing = torch.where(residual.sum(-1, keepdim=True) > 0, residual, probs)
    unit = float(1 << (52 - (weighing.shape[-1] - 1).bit_length()))
    scale = weighing.amax(-1, keepdim=True)
    weights = torch.nan_to_num(weighing / scale * unit, nan=0.0).long()
    return sample_from_weights(weights, _stream(seeds, place), offset)


def _chain_outputs(args: Args) -> tuple[OutputSpec, ...]:
    rows, places, _ = args[0].shape
    return (OutputSpec((rows, places + 1), "int64"), OutputSpec((rows,), "int64"))


def _tree_outputs(args: Args) -> tuple[OutputSpec, ...]:
    rows, depth = args[0].shape[0], tree_depth(args[3])
    return (
        OutputSpec((rows, depth + 1), "int64"),
        OutputSpec((rows, depth), "int64"),
        OutputSpec((rows,), "int64"),
    )


_define = partial(
    define_op,
    # Two distributions a place are read where a token is compared, one pair of them whole for the draw.
    work=estimate(lambda N, S, V: (6 * N * V + 4 * N * S, 2 * N * V, 32 * N * S)),
    operands=(0, 2),
    exact_dims=frozenset({"V", "S"}),
    validate_values=_validate_values,
    differentiable=False,
    stochastic=True,
)
VERIFY_CHAIN = _define(
    build=verify_chain,
    check=partial(_check, "verify_chain"),
    reference=verify_chain_reference,
    outputs=_chain_outputs,
    batching=SamplingBatching(numbers=(3, 4), seed=3, tensors=3),
    wide_outputs=frozenset({0, 1}),
)
VERIFY_TREE = _define(
    build=verify_tree,
    check=_check_tree,
    reference=verify_tree_reference,
    outputs=_tree_outputs,
    batching=SamplingBatching(numbers=(4, 5), seed=4, tensors=3),
    wide_outputs=frozenset({0, 1, 2}),
)
