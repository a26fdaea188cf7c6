"""DeBERTa's attention by `attention`: the scores of positions are a bias, which the module computes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import layerzero.sync as sync
from layerzero.integrations.patches import probe
from layerzero.integrations.patches.substitute import PLAIN, PatchedForward
from layerzero.ops.attention.attention import attention_reference

CLASS = "DisentangledSelfAttention"
_HEADS, _WIDTH, _TOKENS = 2, 8, 3


class DisentangledForward(PatchedForward):
    """Queries, keys and the bias of positions as the module makes them; their attention by the op.

    DeBERTa's first form joins its projections and scales queries before the bias (`in_proj`); its second and
    SEW-D keep them apart, heads in the batch.
    """

    part, op = "attention", "attention"

    def __call__(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor,
        output_attentions: bool = False,
        query_states: Tensor | None = None,
        relative_pos: Tensor | None = None,
        rel_embeddings: Tensor | None = None,
    ) -> Any:
        """What the module's forward takes; weights of attention, and what the op cannot do, are its own."""
        arguments = (
            hidden_states, attention_mask, output_attentions, query_states, relative_pos, rel_embeddings,
        )  # fmt: skip
        if hidden_states.device.type == "meta":
            return self.original(*arguments)
        joined = hasattr(self.module, "in_proj")
        if output_attentions or (joined and query_states is not None):
            return self.decline("arguments", arguments, {})
        if type(hidden_states) not in PLAIN:
            return self.decline("tensor subclass", arguments, {})
        return attend(self.module, *arguments, sync.attention), None

    @staticmethod
    def traced(kind: Any, learnt: Callable[[], Any]) -> Callable[..., Any]:
        """The module's own: a graph leaves it as it is."""
        forward: Callable[..., Any] = kind.forward
        return forward


def attend(
    module: Any, hidden: Tensor, mask: Tensor, weights: bool, queries: Tensor | None, relative: Any,
    embeddings: Any, attention: Callable[..., Any],
) -> Tensor:  # fmt: skip
    """The module's context (B, S, H * D) of `hidden` (B, S, W); mask (B, 1, S, S) says who is seen."""
    heads, batch = module.num_attention_heads, hidden.shape[0]
    factor = 1 + len({"c2p", "p2c"} & set(module.pos_att_type))
    if hasattr(module, "in_proj"):
        split = module.transpose_for_scores
        q, k, v = split(module.in_proj(hidden)).chunk(3, dim=-1)
        factor = 1 + len(module.pos_att_type)
        q = (q + split(module.q_bias[None, None])) / _root(q, factor)
        v, scale = v + split(module.v_bias[None, None]), 1.0
        has_bias, bias_of = embeddings is not None and relative is not None, "disentangled_att_bias"
    else:
        states = (hidden if queries is None else queries, hidden, hidden)
        projections = (module.query_proj, module.key_proj, module.value_proj)
        pairs = zip(projections, states, strict=True)
        q, k, v = (module.transpose_for_scores(project(x), heads) for project, x in pairs)
        scale, has_bias = 1 / math.sqrt(q.shape[-1] * factor), True
        bias_of = "disentangled_attention_bias"
    added: Any = None
    if module.relative_attention and has_bias:
        added = getattr(module, bias_of)(q, k, relative, module.pos_dropout(embeddings), factor)
    q, k, v = (x.reshape(batch, heads, *x.shape[-2:]) for x in (q, k, v))
    # Not a mask of booleans: queries that see no key weigh all of them alike.
    bias = added.reshape(batch, heads, *added.shape[-2:]) if isinstance(added, Tensor) else q.new_zeros(())
    bias = bias.masked_fill(~mask.bool(), torch.finfo(q.dtype).min)
    dropout = float(module.dropout.p) if module.training else 0.0
    out: Tensor = attention(q, k, v, attn_mask=bias, scale=scale, dropout_p=dropout)
    return out.transpose(1, 2).reshape(batch, q.shape[2], -1)


def _root(q: Tensor, factor: int) -> Tensor:
    return torch.tensor(math.sqrt(q.shape[-1] * factor), dtype=q.dtype)


def is_disentangled(module: nn.Module) -> bool:
    """Whether a module's class has the name that DeBERTa's has."""
    return type(module).__name__ == CLASS


def substitute(module: nn.Module) -> DisentangledForward | str:
    """The module with its attention on the op, or why not."""
    if getattr(module, "talking_head", False):
        return "its heads are mixed before and behind the softmax"
    double = _small(module)
    x = probe.numbers(2, _TOKENS, _WIDTH, seed=1)
    ids = torch.arange(_TOKENS, device="cpu")
    span = max(getattr(module, name, 0) for name in ("pos_ebd_size", "max_relative_positions"))
    mask = (ids < torch.tensor([3, 2], device="cpu")[:, None])[:, None, None]
    arguments = (
        x,
        mask & mask.mT,
        False,
        None,
        (ids[:, None] - ids)[None],
        probe.numbers(2 * span, _WIDTH, seed=2),
    )
    theirs = probe.answer(type(module).forward, double, *arguments)
    ours = probe.answer(attend, double, *arguments, attention_reference)
    if isinstance(theirs, tuple) and probe.same(ours, theirs[0]):
        return DisentangledForward(module)
    return probe.why_not(theirs if isinstance(theirs, Exception) else None)


def _small(module: nn.Module) -> nn.Module:
    """The module with two heads of four features."""
    parameters: dict[str, Tensor | None] = {
        name: probe.numbers(_WIDTH, seed=3) for name in module._parameters
    }
    children: dict[str, nn.Module] = {}
    for number, (name, part) in enumerate(module._modules.items()):
        if isinstance(part, nn.Linear):
            rows = part.out_features // part.in_features * _WIDTH
            children[name] = small = nn.Linear(_WIDTH, rows, bias=part.bias is not None, device="meta")
            small.weight = nn.Parameter(probe.numbers(rows, _WIDTH, seed=4 + number), requires_grad=False)
            if part.bias is not None:
                small.bias = nn.Parameter(probe.numbers(rows, seed=24 + number), requires_grad=False)
        elif part is not None:
            children[name] = nn.Identity()
    double = probe.stand_in(module, {**parameters}, children)
    sizes = {"num_attention_heads": _HEADS, "attention_head_size": _WIDTH // _HEADS, "all_head_size": _WIDTH}
    double.__dict__.update(sizes)
    return double
