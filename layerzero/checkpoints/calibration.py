"""What a model's matrices multiply while a text runs through it: sums of products, by the weight's name."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from layerzero.checkpoints.rounding import missing_library

ROW = 512  # tokens of one forward pass
# Of the shipped text, 8 rows left MXFP4 by gptq worse than rounding to the nearest.
MOST_ROWS = 24


def run_text(
    folder: Path, text: str, names: Sequence[str], progress: Callable[[int, int, str], None] | None = None
) -> tuple[dict[str, Tensor], int]:
    """X'X (K, K) in float64 of each named weight's rows X, and how many tokens of `text` ran.

    The model is the folder's, as transformers makes it, in float32 on the CPU; at most MOST_ROWS rows of ROW
    tokens run, spread evenly over the text.
    Raises: BackendNotAvailableError: transformers is not installed. ValueError: the text has no two tokens.
    """
    if importlib.util.find_spec("transformers") is None:
        raise missing_library("calibrate", "transformers")
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    ids: list[int] = tokenizer(text, verbose=False)["input_ids"]
    if len(ids) < 2:
        raise ValueError(f"calibrate needs a text of at least two tokens, got {len(ids)}")
    rows = spread_rows(ids)
    model: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, local_files_only=True
    ).eval()
    grams: dict[str, Tensor] = {}
    modules = dict(model.named_modules())
    handles = [
        modules[name.removesuffix(".weight")].register_forward_pre_hook(_adding(name, grams))
        for name in names
        if name.removesuffix(".weight") in modules
    ]
    try:
        with torch.no_grad():
            for done, row in enumerate(rows):
                model(torch.tensor([row]))
                if progress is not None:
                    progress(done + 1, len(rows), "calibration")
    finally:
        for handle in handles:
            handle.remove()
    return grams, sum(map(len, rows))


def spread_rows(ids: Sequence[int]) -> list[Sequence[int]]:
    """Rows of ROW tokens: all, or MOST_ROWS of them as far apart as they can be."""
    rows = [ids[start : start + ROW] for start in range(0, len(ids), ROW)]
    count = min(len(rows), MOST_ROWS)
    return [rows[turn * len(rows) // count] for turn in range(count)]


def _adding(name: str, grams: dict[str, Tensor]) -> Callable[..., None]:
    def add(module: Any, inputs: tuple[Any, ...]) -> None:
        rows = inputs[0].detach().flatten(0, -2).double()
        grams[name] = rows.T @ rows + grams.get(name, 0.0)

    return add
