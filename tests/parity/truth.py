"""The two sides that the ladder compares: our blocking ops, and the same formulas written out in float64."""

from __future__ import annotations

import math
from typing import Any, Protocol

import torch
from torch import Tensor

import layerzero.sync as sync
from layerzero.ops.rope.scaling import rope_tables

MAX_POSITIONS = 512


class Side(Protocol):
    """What the models of the ladder are written over. Shapes: rows (S, C); heads (B, H, S, D)."""

    interleaved: bool

    def embedding(self, ids: Tensor, weight: Tensor) -> Tensor: ...
    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor: ...
    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor: ...
    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor: ...
    def tables(self, head_dim: int, base: float) -> tuple[Tensor, Tensor]: ...
    def rope(self, q: Tensor, k: Tensor, positions: Tensor, base: float) -> tuple[Tensor, Tensor]: ...
    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool, window: int | None = None
    ) -> tuple[Tensor, Tensor]: ...
    def paged(self, q: Tensor, k: Tensor, v: Tensor, tables: Tensor, lens: Tensor, cu: Tensor) -> Tensor: ...
    def mlp(
        self, x: Tensor, up: Tensor, down: Tensor, b_up: Tensor | None, b_down: Tensor | None, act: str
    ) -> Tensor: ...
    def cross_entropy(self, logits: Tensor, target: Tensor) -> Tensor: ...


class Ours:
    """Our ops, as a caller gets them: whatever kernel the choice falls on."""

    interleaved = False

    def embedding(self, ids: Tensor, weight: Tensor) -> Tensor:
        return sync.embedding(ids, weight)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return sync.rms_norm(x, weight, eps=eps)

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        return sync.layer_norm(x, weight, bias, eps=eps)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return sync.linear(x, weight, bias)

    def tables(self, head_dim: int, base: float) -> tuple[Tensor, Tensor]:
        return rope_tables(head_dim, MAX_POSITIONS, base=base)

    def rope(self, q: Tensor, k: Tensor, positions: Tensor, base: float) -> tuple[Tensor, Tensor]:
        cos, sin = self.tables(q.shape[-1], base)
        return sync.rope(q, k, positions, cos, sin, interleaved=self.interleaved)

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool, window: int | None = None
    ) -> tuple[Tensor, Tensor]:
        bounds = None if window is None else (window, 0)
        # Two calls: kernels that give no log-sum-exp are the ones that serve calls without it.
        out = sync.attention(q, k, v, is_causal=causal, window=bounds)
        with torch.no_grad():
            _, lse = sync.attention(q, k, v, is_causal=causal, window=bounds, return_lse=True)
        return out, lse

    def paged(self, q: Tensor, k: Tensor, v: Tensor, tables: Tensor, lens: Tensor, cu: Tensor) -> Tensor:
        return sync.paged_attention(q, k, v, tables, lens, cu_seqlens_q=cu)

    def mlp(
        self, x: Tensor, up: Tensor, down: Tensor, b_up: Tensor | None, b_down: Tensor | None, act: str
    ) -> Tensor:
        return sync.mlp(x, up, down, b_up, b_down, activation=act)  # type: ignore[arg-type]  # a word of the op's own

    def cross_entropy(self, logits: Tensor, target: Tensor) -> Tensor:
        return sync.cross_entropy(logits, target)


class Truth:
    """The formulas, term by term, on float64; shares no line with our references."""

    interleaved = False

    def embedding(self, ids: Tensor, weight: Tensor) -> Tensor:
        return torch.stack([weight[int(i)] for i in ids])

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        return centred / torch.sqrt((centred * centred).mean(-1, keepdim=True) + eps) * weight + bias

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        out = torch.einsum("...i,oi->...o", x, weight)
        return out if bias is None else out + bias

    def tables(self, head_dim: int, base: float) -> tuple[Tensor, Tensor]:
        pair = torch.arange(head_dim // 2, dtype=torch.float64)
        angle = torch.arange(MAX_POSITIONS, dtype=torch.float64)[:, None] * base ** (-2 * pair / head_dim)
        return angle.cos(), angle.sin()

    def rope(self, q: Tensor, k: Tensor, positions: Tensor, base: float) -> tuple[Tensor, Tensor]:
        cos, sin = (t[positions][:, None] for t in self.tables(q.shape[-1], base))

        def turned(x: Tensor) -> Tensor:
            if self.interleaved:
                a, b = x[..., 0::2], x[..., 1::2]
                return torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)
            half = x.shape[-1] // 2
            a, b = x[..., :half], x[..., half:]
            return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)

        return turned(q), turned(k)

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool, window: int | None = None
    ) -> tuple[Tensor, Tensor]:
        groups = q.shape[1] // k.shape[1]
        k, v = (t.repeat_interleave(groups, 1) for t in (k, v))
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        # Bottom-right: the last query sees the last key.
        ahead = torch.arange(k.shape[2]) - torch.arange(q.shape[2])[:, None] - (k.shape[2] - q.shape[2])
        hidden = torch.zeros_like(ahead, dtype=torch.bool)
        if causal:
            hidden |= ahead > 0
        if window is not None:
            hidden |= (ahead < -window) | (ahead > 0)
        scores = scores.masked_fill(hidden, -math.inf)
        return scores.softmax(-1) @ v, scores.logsumexp(-1)

    def paged(self, q: Tensor, k: Tensor, v: Tensor, tables: Tensor, lens: Tensor, cu: Tensor) -> Tensor:
        outs = []
        for n in range(len(lens)):
            own = q[cu[n] : cu[n + 1]].transpose(0, 1)[None]
            keys, values = (
                pages[tables[n]].flatten(0, 1)[: lens[n]].transpose(0, 1)[None] for pages in (k, v)
            )
            outs.append(self.attention(own, keys, values, True)[0][0].transpose(0, 1))
        return torch.cat(outs)

    def mlp(
        self, x: Tensor, up: Tensor, down: Tensor, b_up: Tensor | None, b_down: Tensor | None, act: str
    ) -> Tensor:
        inner = self.linear(x, up, b_up)
        if act == "swiglu":
            gate, value = inner.chunk(2, -1)
            inner = gate / (1 + torch.exp(-gate)) * value
        elif act == "gelu":
            inner = inner * 0.5 * (1 + torch.erf(inner / math.sqrt(2.0)))
        else:
            raise ValueError(f"act needs swiglu or gelu, got {act!r}")
        return self.linear(inner, down, b_down)

    def cross_entropy(self, logits: Tensor, target: Tensor) -> Tensor:
        chosen = logits.gather(-1, target[:, None])[:, 0]
        return (logits.exp().sum(-1).log() - chosen).mean()


class _Scaled(torch.autograd.Function):
    """The identity with a gradient that is 2 % too large."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] * 1.02


def planted(name: str) -> Ours:
    """Our side with a known bug in one op; `""` has none.

    Raises: ValueError: no such bug.
    """
    made = Ours()
    bugs: dict[str, tuple[str, Any]] = {
        "embedding": ("embedding", lambda f: lambda ids, w: f((ids + 1) % len(w), w)),
        "rms_norm": ("rms_norm", lambda f: lambda x, w, eps: f(x, w, eps + 1e-2)),
        "layer_norm": ("layer_norm", lambda f: lambda x, w, b, eps: f(x, w, b, eps + 1e-2)),
        "linear": ("linear", lambda f: lambda x, w, b=None: f(x, w * 1.001, b)),
        "rope": ("rope", lambda f: lambda q, k, p, base: f(q, k, p, base * 2)),
        "attention": ("attention", lambda f: lambda q, k, v, c, w=None: f(q * 1.01, k, v, c, w)),
        "attention_backward": ("attention", lambda f: lambda q, k, v, c, w=None: f(q, k, _backward(v), c, w)),
        "window": ("attention", lambda f: lambda q, k, v, c, w=None: f(q, k, v, c, w and w + 1)),
        "paged": ("paged", lambda f: lambda q, k, v, t, lens, cu: f(q, k, v, t.flip(1), lens, cu)),
        "mlp": ("mlp", lambda f: lambda x, up, *rest: f(x, up * 1.001, *rest)),
        "cross_entropy": ("cross_entropy", lambda f: lambda x, t: f(x * 1.01, t)),
    }
    if name == "convention":
        made.interleaved = True
    elif name:
        if name not in bugs:
            raise ValueError(f"plant needs one of {', '.join([*bugs, 'convention'])}, got {name!r}")
        method, wrap = bugs[name]
        setattr(made, method, wrap(getattr(made, method)))
    return made


def _backward(x: Tensor) -> Tensor:
    scaled: Tensor = _Scaled.apply(x)  # type: ignore[no-untyped-call]
    return scaled
