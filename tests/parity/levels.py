"""The levels: each gives rows of differences, in the order in which the values are computed."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from layerzero.gates.model_parity import Row, largest
from layerzero.spec.tolerances import PARITY_LOGITS
from tests.bounds import PARITY_KERNEL, PARITY_LAYER
from tests.parity.model import CONFIGS, Config, bert, llama, llama_layer, random_llama
from tests.parity.training import level_5
from tests.parity.truth import Ours, Side, Truth
from tests.parity.weights import judged, real_models

ROWS = 12
Call = Callable[[Side, list[Tensor]], tuple[Tensor, ...]]


def _randn(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=generator)


# -- level 1: every op, forward and backward ----------------------------------------------------------


def _cases(c: Config, g: torch.Generator) -> Iterator[tuple[str, list[Tensor], Call]]:
    d, s = c.head_dim, ROWS
    heads = [_randn(g, 2, c.heads, s, d), *(_randn(g, 2, c.heads, s, d) for _ in range(2))]
    grouped = [_randn(g, 2, c.heads, s, d), *(_randn(g, 2, c.kv_heads, s, d) for _ in range(2))]
    rows, weight = _randn(g, s, c.hidden), _randn(g, c.hidden)
    scale = c.hidden**-0.5
    ids = torch.randint(0, c.vocab, (s,), generator=g)
    positions = torch.arange(s) + 3
    yield "rope precompute", [], lambda o, _: o.tables(d, c.base)
    turn = [_randn(g, s, c.heads, d), _randn(g, s, c.kv_heads, d)]
    yield "rope", turn, lambda o, t: o.rope(t[0], t[1], positions, c.base)
    yield "rms_norm", [rows, weight], lambda o, t: (o.rms_norm(t[0], t[1], c.eps),)
    yield (
        "layer_norm",
        [rows, weight, _randn(g, c.hidden)],
        lambda o, t: (o.layer_norm(t[0], t[1], t[2], c.eps),),
    )
    yield "attention", heads, lambda o, t: (o.attention(t[0], t[1], t[2], True)[0],)
    yield "attention gqa", grouped, lambda o, t: (o.attention(t[0], t[1], t[2], True)[0],)
    yield (
        "attention decode",
        [grouped[0][:, :, :1], *grouped[1:]],
        lambda o, t: (o.attention(t[0], t[1], t[2], True)[0],),
    )
    yield "attention window", grouped, lambda o, t: (o.attention(t[0], t[1], t[2], True, 4)[0],)
    yield (
        "attention window decode",
        [grouped[0][:, :, :1], *grouped[1:]],
        lambda o, t: (o.attention(t[0], t[1], t[2], True, 4)[0],),
    )
    matrix = _randn(g, c.hidden, c.hidden) * scale
    yield "linear", [rows, matrix], lambda o, t: (o.linear(t[0], t[1]),)
    up, down = _randn(g, 4 * c.hidden, c.hidden) * scale, _randn(g, c.hidden, 2 * c.hidden) * scale
    yield "mlp swiglu", [rows, up, down], lambda o, t: (o.mlp(t[0], t[1], t[2], None, None, "swiglu"),)
    narrow = _randn(g, 2 * c.hidden, c.hidden) * scale
    yield "mlp gelu", [rows, narrow, down], lambda o, t: (o.mlp(t[0], t[1], t[2], None, None, "gelu"),)
    logits = [_randn(g, s, c.vocab)]
    yield "cross_entropy", logits, lambda o, t: (o.cross_entropy(t[0], ids % c.vocab),)
    yield "embedding", [_randn(g, c.vocab, c.hidden)], lambda o, t: (o.embedding(ids, t[0]),)


def _paged(c: Config, g: torch.Generator) -> Iterator[tuple[str, list[Tensor], Call]]:
    pages = [_randn(g, 8, 4, c.kv_heads, c.head_dim) for _ in range(2)]
    tables, lens = torch.randperm(8, generator=g).view(2, 4), torch.tensor([13, 7])
    for name, counts in (("paged prefill", [0, 5, 9]), ("paged decode", [0, 1, 2])):
        cu = torch.tensor(counts)
        tensors = [_randn(g, counts[-1], c.heads, c.head_dim), *pages]
        yield name, tensors, lambda o, t, cu=cu: (o.paged(t[0], t[1], t[2], tables, lens, cu),)  # type: ignore[misc]


def level_1(ours: Ours, config: Config) -> Iterator[Row]:
    """Every op on `config`'s sizes: outputs, then the gradient of every float input."""
    generator = torch.Generator().manual_seed(1)
    for name, tensors, call in _cases(config, generator):
        mine = [t.clone().requires_grad_() for t in tensors]
        true = [t.double().requires_grad_() for t in tensors]
        got, want = call(ours, mine), call(Truth(), true)
        yield Row(f"{name} forward", config.name, max(map(largest, got, want)), PARITY_KERNEL)
        if not tensors:
            continue
        along = [_randn(generator, *w.shape) / max(1, w.numel()) ** 0.5 for w in want]
        ours_grads = torch.autograd.grad(got, mine, along)
        true_grads = torch.autograd.grad(want, true, [a.double() for a in along])
        yield Row(f"{name} backward", config.name, max(map(largest, ours_grads, true_grads)), PARITY_KERNEL)
    with torch.no_grad():
        for name, tensors, call in _paged(config, generator):
            got, want = call(ours, tensors), call(Truth(), [t.double() for t in tensors])
            yield Row(f"{name} forward", config.name, max(map(largest, got, want)), PARITY_KERNEL)


# -- level 2: one layer, all its buffers --------------------------------------------------------------


_BACKWARD = (
    "mlp.down_proj", "mlp.up_proj", "mlp.gate_proj", "post_attention_layernorm", "self_attn.o_proj",
    "self_attn.v_proj", "self_attn.k_proj", "self_attn.q_proj", "input_layernorm",
)  # fmt: skip


def level_2(ours: Ours, config: Config) -> Iterator[Row]:
    """A whole layer: every buffer, the gradient of its input and weights, and prefill then decode."""
    model = random_llama(config)
    x = _randn(torch.Generator().manual_seed(2), ROWS, config.hidden)
    sides: tuple[tuple[Side, torch.dtype], ...] = ((ours, torch.float32), (Truth(), torch.float64))
    buffers: list[dict[str, Tensor]] = []
    gradients: list[dict[str, Tensor]] = []
    for side, dtype in sides:
        own, start, kept = model.cast(dtype, grad=True), x.to(dtype).requires_grad_(), dict[str, Tensor]()
        out = llama_layer(side, own, 0, start, kept.__setitem__)
        # In the order in which a gradient comes back.
        names = [f"model.layers.0.{name}.weight" for name in _BACKWARD]
        leaves = {**{name: own.weights[name] for name in names}, "x": start}
        loss = (out * out.detach().cos()).sum() / out.numel() ** 0.5
        found = torch.autograd.grad(loss, list(leaves.values()))
        buffers.append(kept)
        gradients.append(dict(zip(leaves, found, strict=True)))
    for name, got in buffers[0].items():
        yield Row(name, config.name, largest(got, buffers[1][name]), PARITY_LAYER)
    for name, got in gradients[0].items():
        yield Row(f"gradient of {name}", config.name, largest(got, gradients[1][name]), PARITY_LAYER)
    own, record = model.cast(torch.float32), dict[str, Tensor]().__setitem__  # stages are compared above
    with torch.no_grad():
        whole = llama_layer(ours, own, 0, x, record)
        pieces = [llama_layer(ours, own, 0, x[:7], record)]
        pieces += [llama_layer(ours, own, 0, x[i : i + 1], record, i) for i in range(7, ROWS)]
    yield Row("prefill + decode", config.name, largest(torch.cat(pieces), whole), PARITY_LAYER)


# -- level 3: the stages of every layer, on real weights ----------------------------------------------


def level_3(ours: Ours) -> Iterator[Row]:
    """Every stage of every layer of each real model, against the same model in float64."""
    for model, ids in real_models():
        forward = bert if model.kind == "bert" else llama
        kept: list[dict[str, Tensor]] = [{}, {}]
        truth = Truth()
        truth.interleaved = ours.interleaved  # the convention is the model's, not an op's
        with torch.no_grad():
            forward(ours, model.cast(torch.float32), ids, kept[0].__setitem__)
            forward(truth, model.cast(torch.float64), ids, kept[1].__setitem__)
        for name, got in kept[0].items():
            allowed = PARITY_LOGITS if name == "logits" else PARITY_LAYER
            yield Row(name, model.source, largest(got, kept[1][name]), allowed)


# -- level 4: the whole model against transformers ----------------------------------------------------


def level_4(ours: Ours) -> Iterator[Row]:
    """Hidden states of every layer and the last outputs against transformers' own model; top-1 tokens.

    Positions are compared one by one where the whole differs, so that the first wrong one is named.
    """
    for model, ids in real_models():
        states, outputs = judged(model, ids)
        kept: dict[str, Tensor] = {}
        forward = bert if model.kind == "bert" else llama
        with torch.no_grad():
            got = forward(ours, model.cast(torch.float32), ids, kept.__setitem__)
        for index, state in enumerate(states):
            yield Row(f"layer {index} output", model.source, largest(kept[f"layer {index} output"], state),
                      PARITY_LOGITS)  # fmt: skip
        yield Row("outputs", model.source, largest(got, outputs), PARITY_LOGITS)
        mean = (got.double() - outputs.double()).abs().mean().item()
        yield Row("outputs, mean", model.source, mean, PARITY_LOGITS)
        per_row = (got.double() - outputs.double()).abs().amax(-1)
        for position in (per_row >= PARITY_LOGITS).nonzero()[:1, 0].tolist():
            yield Row(f"position {position}", model.source, per_row[position].item(), PARITY_LOGITS)
        if model.kind == "llama":
            wrong = (got.argmax(-1) != outputs.argmax(-1)).sum().item()
            yield Row("top-1 tokens that differ", model.source, float(wrong), 0.5)


def run(level: int, ours: Ours, config: str | None = None, steps: int = 20) -> list[Row]:
    """Every row of a level; levels 1, 2 and 5 on all configurations or on one, level 5 for so many steps.

    Raises: ValueError: no such level or configuration.
    """
    if config is not None and config not in CONFIGS:
        raise ValueError(f"config needs one of {', '.join(CONFIGS)}, got {config!r}")
    chosen = list(CONFIGS.values()) if config is None else [CONFIGS[config]]
    if level == 1:
        return [row for each in chosen for row in level_1(ours, each)]
    if level == 2:
        return [row for each in chosen for row in level_2(ours, each)]
    if level == 3:
        return list(level_3(ours))
    if level == 4:
        return list(level_4(ours))
    if level == 5:
        return [row for each in chosen for row in level_5(ours, each, steps)]
    raise ValueError(f"level needs 1 to 5, got {level}")


_BACKWARD_OF = {
    "down_proj": "mlp", "up_proj": "mlp", "gate_proj": "mlp", "post_attention_layernorm": "mlp",
    "o_proj": "rms_norm", "v_proj": "attention", "k_proj": "attention or rope", "q_proj": "attention or rope",
    "input_layernorm": "linear",
}  # fmt: skip


def suspect(row: Row) -> str:
    """Which op stands behind a stage that is the first to differ."""
    if row.what.startswith("gradient of "):
        part = row.what.removesuffix(".weight").split(".")[-1]
        return f"{_BACKWARD_OF.get(part, 'rms_norm')}, backward"
    words = row.what.split()
    name = words[-1] if words[0] == "layer" else row.what
    table = {
        "ln1_out": "rms_norm or layer_norm", "ln2_out": "rms_norm or layer_norm", "norm": "rms_norm",
        "q_rope": "rope", "k_rope": "rope", "q_proj": "linear", "k_proj": "linear", "v_proj": "linear",
        "proj_out": "linear", "fc1_out": "linear", "logits": "linear",
        "scores": "attention", "attn_out": "attention", "swiglu_out": "mlp", "mlp_out": "mlp",
        "output": "mlp", "embedding": "embedding",
    }  # fmt: skip
    return table.get(name, name)
