"""Bias, penalties, masks and min-p on logits of many requests, against one formula a token."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

import layerzero as lz

VOCAB = 37  # no multiple of a mask's word


def plainly(logits: list[float], row: dict[str, Any]) -> list[float]:
    """What one row's parameters make of its logits, token by token."""
    adjusted = []
    generated = row["history"][row["prompt"] :]
    for token, value in enumerate(logits):
        value += sum(bias for biased, bias in row["bias"] if biased == token)
        if token in row["history"]:
            value = value / row["repetition"] if value > 0 else value * row["repetition"]
        count = generated.count(token)
        value -= row["frequency"] * count + (row["presence"] if count else 0.0)
        adjusted.append(value if token in row["allowed"] else -math.inf)
    least = max(adjusted) + (row["temperature"] * math.log(row["min_p"]) if row["min_p"] else -math.inf)
    if row["temperature"] == 0:
        return adjusted
    return [value if value >= least else -math.inf for value in adjusted]


ROWS = st.lists(
    st.fixed_dictionaries(
        {
            "seed": st.integers(0, 99),
            "history": st.lists(st.integers(0, VOCAB - 1), max_size=9),
            "prompt": st.integers(0, 9),
            "repetition": st.sampled_from([0.5, 1.0, 1.3, 2.0]),
            "presence": st.sampled_from([-1.0, 0.0, 0.5, 2.0]),
            "frequency": st.sampled_from([-0.5, 0.0, 0.25, 1.5]),
            "bias": st.lists(st.tuples(st.integers(0, VOCAB - 1), st.floats(-9, 9)), max_size=4),
            "allowed": st.one_of(st.just(set(range(VOCAB))), st.sets(st.integers(0, VOCAB - 1), min_size=1)),
            "min_p": st.sampled_from([0.0, 0.05, 0.5, 1.0]),
            "temperature": st.sampled_from([0.0, 0.3, 1.0, 1.7]),
        }
    ),
    min_size=1,
    max_size=5,
)


def padded(rows: list[list[Any]], filler: Any) -> torch.Tensor:
    """Lists of different lengths as one tensor; a column more than needed, so that every row has a gap."""
    width = max(map(len, rows)) + 1
    filled = [row + [filler] * (width - len(row)) for row in rows]
    return torch.tensor(filled, dtype=torch.float64 if isinstance(filler, float) else torch.int64)


def mask(allowed: set[int]) -> list[int]:
    """The bits of some tokens as signed words."""
    words = [0] * -(-VOCAB // 32)
    for token in allowed:
        words[token // 32] |= 1 << token % 32
    return [word - (1 << 32) if word >> 31 else word for word in words]


def adjusted(rows: list[dict[str, Any]], logits: torch.Tensor) -> torch.Tensor:
    """All rows in one call."""

    def floats(name: str) -> torch.Tensor:
        return torch.tensor([row[name] for row in rows], dtype=torch.float64)

    return lz.adjust_logits(
        logits,
        history=padded([row["history"] for row in rows], -1),
        prompt_lens=torch.tensor([row["prompt"] for row in rows]),
        repetition_penalty=floats("repetition"),
        presence_penalty=floats("presence"),
        frequency_penalty=floats("frequency"),
        bias_tokens=padded([[token for token, _ in row["bias"]] for row in rows], -1),
        bias=padded([[bias for _, bias in row["bias"]] for row in rows], 7.0),
        allowed=torch.tensor([mask(row["allowed"]) for row in rows], dtype=torch.int32),
        min_p=floats("min_p"),
        temperature=floats("temperature"),
    )


@given(ROWS)
def test_rows_of_different_requests_are_adjusted_as_the_formula_says(rows: list[dict[str, Any]]) -> None:
    """Every row by its own parameters, whoever stands beside it; the input stays what it was."""
    logits = torch.stack(
        [torch.randn(VOCAB, generator=torch.Generator().manual_seed(row["seed"])) for row in rows]
    ).double()
    before = logits.clone()
    expected = torch.tensor(
        [plainly(values, row) for values, row in zip(logits.tolist(), rows, strict=True)],
        dtype=torch.float64,
    )
    together = adjusted(rows, logits)
    assert_close(together, expected)
    assert torch.equal(logits, before)
    for index, row in enumerate(rows):
        assert torch.equal(adjusted([row], logits[index : index + 1])[0], together[index])


def test_nothing_asked_is_nothing_done() -> None:
    """Neutral numbers give the logits themselves, and a history alone changes nothing."""
    logits = torch.randn(2, 5)
    assert lz.adjust_logits(logits, history=torch.tensor([[1], [2]])) is logits
    assert lz.adjust_logits(logits.half()).dtype == torch.float32


@pytest.mark.parametrize("token", [0, 31, 32, VOCAB - 1])
def test_a_mask_of_one_token_draws_that_token(token: int) -> None:
    """The lowest and the highest bit of a word, and the last of a vocabulary that fills no word."""
    masked = lz.adjust_logits(torch.randn(1, VOCAB), allowed=torch.tensor([mask({token})], dtype=torch.int32))
    assert lz.sync.sample(masked, temperature=2.0, seed=1).tolist() == [token]


def test_min_p_keeps_what_is_likely_enough_at_its_temperature() -> None:
    """At a share of a tenth, a token at a ninth of the likeliest stays and one at an eleventh goes."""
    for temperature in (0.5, 1.0, 2.0):
        logits = torch.tensor([[0.0, -math.log(9), -math.log(11)]]) * temperature
        left = lz.adjust_logits(logits, min_p=0.1, temperature=temperature)
        assert left.isfinite().tolist() == [[True, True, False]]


@given(st.integers(1, 5), st.integers(0, VOCAB), st.integers(0, 999))
def test_logprobs_are_those_of_the_softmax(rows: int, top: int, seed: int) -> None:
    """The token's and the likeliest tokens' probabilities; all of them together are one."""
    logits = torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)).double() * 3
    tokens = torch.arange(rows) % VOCAB
    chosen, likeliest, values = lz.token_logprobs(logits, tokens, top)
    probabilities = logits.exp() / logits.exp().sum(-1, keepdim=True)
    assert_close(chosen.exp(), probabilities[torch.arange(rows), tokens])
    assert_close(values.exp(), probabilities.sort(-1, descending=True).values[:, :top])
    assert_close(values.exp(), probabilities.gather(-1, likeliest))
    assert_close(
        lz.token_logprobs(logits, tokens, VOCAB)[2].exp().sum(-1), torch.ones(rows, dtype=torch.float64)
    )


LOGITS = torch.zeros(2, 40)
IDS = torch.zeros(2, 3, dtype=torch.int64)
BITS = torch.zeros(2, 2, dtype=torch.int32)


def adjust(**parameters: Any) -> torch.Tensor:
    """Two rows of zeros with `parameters`."""
    return lz.adjust_logits(LOGITS, **parameters)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_the_likeliest_are_the_first_of_any_longer_list(dtype: torch.dtype) -> None:
    """Rows of bfloat16 have many equal logits: a neighbour that asks for more changes nobody's list."""
    logits = torch.randn(5, 512, generator=torch.Generator().manual_seed(1)).bfloat16().to(dtype)
    logits[1] = 0.0
    logits[2, 3:] = -math.inf
    logits[3, 7] = math.nan
    tokens, stable = torch.arange(5), logits.sort(dim=-1, descending=True, stable=True).indices
    for top in (0, 1, 2, 3, 5, 20, 512):
        _, likeliest, values = lz.token_logprobs(logits, tokens, top)
        fair = torch.tensor([0, 1, 2, 4])
        assert torch.equal(likeliest[fair], stable[fair, :top])
        assert torch.equal(values[fair], logits.to(values.dtype).log_softmax(-1).gather(-1, likeliest)[fair])
        assert values[3].isnan().all()


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: lz.adjust_logits(LOGITS[0]), ValueError, "logits needs"),
        (lambda: adjust(presence_penalty=1.0), ValueError, "history needs the tokens"),
        (lambda: adjust(history=IDS[:1], presence_penalty=1.0), ValueError, "history needs 2"),
        (lambda: adjust(history=IDS + 40, presence_penalty=1.0), ValueError, "history needs ids"),
        (lambda: adjust(history=IDS - 2, presence_penalty=1.0), ValueError, "history needs ids"),
        (lambda: adjust(history=IDS.float(), presence_penalty=1.0), TypeError, "history needs"),
        (lambda: adjust(history=IDS, repetition_penalty=0.0), ValueError, "repetition_penalty needs"),
        (lambda: adjust(history=IDS, frequency_penalty="1"), TypeError, "frequency_penalty needs"),
        (lambda: adjust(presence_penalty=torch.zeros(3)), ValueError, "presence_penalty needs 2"),
        (lambda: adjust(min_p=1.1), ValueError, "min_p needs"),
        (lambda: adjust(min_p=math.nan), ValueError, "min_p needs"),
        (lambda: adjust(temperature=-1.0), ValueError, "temperature needs"),
        (lambda: adjust(bias=IDS.float()), ValueError, "bias and bias_tokens need"),
        (
            lambda: adjust(bias=torch.zeros(2, 4), bias_tokens=IDS),
            ValueError,
            "bias needs shape",
        ),
        (lambda: adjust(allowed=BITS.long()), TypeError, "allowed needs a tensor of int32"),
        (lambda: adjust(allowed=BITS[:, :1]), ValueError, "allowed needs shape"),
        (
            lambda: adjust(history=IDS, presence_penalty=1.0, prompt_lens=-1),
            ValueError,
            "prompt_lens needs",
        ),
        (lambda: lz.token_logprobs(LOGITS, IDS[:, 0], 41), ValueError, "top needs"),
        (lambda: lz.token_logprobs(LOGITS, IDS[0]), ValueError, "tokens needs 2"),
        (lambda: lz.token_logprobs(LOGITS, IDS[:, 0] + 40), ValueError, "tokens needs ids"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_named(call: Callable[[], Any], error: type[Exception], message: str) -> None:
    """The message begins with the argument and what it needs."""
    with pytest.raises(error, match=f"^{message}"):
        call()


def test_a_compiler_sees_no_read() -> None:
    """On a device nothing is read: shapes alone give the result, as a captured step needs it."""
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode() as mode:
        logits, ids = mode.from_tensor(LOGITS), mode.from_tensor(IDS)
        penalty = mode.from_tensor(torch.ones(2))
        out = lz.adjust_logits(
            logits, history=ids, prompt_lens=ids[:, 0], presence_penalty=penalty, min_p=penalty,
            bias_tokens=ids, bias=ids.float(), allowed=mode.from_tensor(BITS),
        )  # fmt: skip
        assert out.shape == (2, 40)
        assert [part.shape for part in lz.token_logprobs(logits, ids[:, 0], 3)] == [(2,), (2, 3), (2, 3)]
