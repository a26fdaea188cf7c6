"""The fifth level: the same training on both sides, and what is compared after 1, 5, 20 and 100 steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from layerzero.gates.model_parity import Row, largest
from layerzero.spec.tolerances import PARITY_EMBEDDING_GRADIENT, PARITY_LATER_GRADIENT
from tests.bounds import PARITY_TRAINING, PARITY_TRAINING_GRADIENT, PARITY_TREND
from tests.parity.model import Config, Model, llama, random_llama
from tests.parity.truth import Ours, Side, Truth

ROWS = 24
STEPS = (1, 5, 20, 100)
EMBEDDING = "model.embed_tokens.weight"
OPTIMIZERS: Mapping[str, Callable[[list[Tensor]], torch.optim.Optimizer]] = {
    "SGD": lambda weights: torch.optim.SGD(weights, lr=0.02),
    "AdamW": lambda weights: torch.optim.AdamW(weights, lr=1e-4, eps=1e-6),
}


class _Training:
    """One side's model with its optimizer, over one text again and again."""

    def __init__(self, side: Side, model: Model, dtype: torch.dtype, optimizer: str) -> None:
        self._side, self.model = side, model.cast(dtype, grad=True)
        generator = torch.Generator().manual_seed(5)
        text = torch.randint(0, model.config.vocab, (ROWS + 1,), generator=generator)
        self._ids, self._targets = text[:-1], text[1:]
        self._optimizer = OPTIMIZERS[optimizer](list(self.model.weights.values()))
        self.losses: list[float] = []

    def step(self) -> None:
        """One forward, backward and update."""
        self._optimizer.zero_grad()
        logits = llama(self._side, self.model, self._ids, lambda name, value: None)
        loss = self._side.cross_entropy(logits, self._targets)
        loss.backward()
        self._optimizer.step()
        self.losses.append(loss.item())

    def gradients(self) -> dict[str, Tensor]:
        """The gradient of each weight in the last step."""
        return {name: w.grad for name, w in self.model.weights.items() if w.grad is not None}


def level_5(ours: Ours, config: Config, steps: int) -> Iterator[Row]:
    """Losses, weights and gradients of two optimizers after each of `STEPS` up to `steps`."""
    for optimizer in OPTIMIZERS:
        model = random_llama(config)
        mine = _Training(ours, model, torch.float32, optimizer)
        true = _Training(Truth(), model, torch.float64, optimizer)
        for step in range(1, steps + 1):
            mine.step()
            true.step()
            if step in STEPS:
                yield from _compare(mine, true, f"{config.name}, {optimizer}", step)


def _compare(mine: _Training, true: _Training, where: str, step: int) -> Iterator[Row]:
    after = f"after {step} step{'s' if step > 1 else ''}"
    if step > STEPS[2]:
        # So far apart, runs are compared by where they go: the loss falls, and by as much.
        fallen = [run.losses[0] - run.losses[-1] for run in (mine, true)]
        yield Row(
            f"fall of the loss {after}", where, abs(fallen[0] - fallen[1]), PARITY_TREND * max(fallen[1], 0.0)
        )
        return
    weight_bound, loss_bound = PARITY_TRAINING[step]
    yield Row(f"loss {after}", where, abs(mine.losses[-1] - true.losses[-1]), loss_bound)
    wanted = true.gradients()
    for name, gradient in mine.gradients().items():
        bound = PARITY_TRAINING_GRADIENT if step == 1 else PARITY_LATER_GRADIENT
        if name == EMBEDDING and step > 1:
            bound = PARITY_EMBEDDING_GRADIENT
        yield Row(f"gradient of {name} {after}", where, largest(gradient, wanted[name]), bound)
    for name, weight in mine.model.weights.items():
        yield Row(f"{name} {after}", where, largest(weight, true.model.weights[name]), weight_bound)
