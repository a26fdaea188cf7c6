"""The filter rule against one written with sorted lists, and the generator against plain integers."""

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from layerzero.ops.sampling.draw import row_seeds, sample_from_weights, token_weights, uniform

BITS = (1 << 64) - 1


def kept_tokens(logits: list[float], temperature: float, top_k: int, top_p: float) -> dict[int, float]:
    """What the rule keeps, with probabilities, by sorting and adding."""
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    if temperature == 0:
        return {order[0]: 1.0}
    order = order[:top_k] if top_k else order
    mass = {i: math.exp((logits[i] - logits[order[0]]) / temperature) for i in order}
    total, reached = sum(mass.values()), 0.0
    kept: dict[int, float] = {}
    for i in order:
        if kept and reached >= top_p * total:
            break
        kept[i] = mass[i]
        reached += mass[i]
    return {i: m / reached for i, m in kept.items() if m > 0}


# One draw a logit: a quarter, or as often none at all.
LOGITS = [n / 4 for n in range(-12, 13)] + [-math.inf] * 25


@given(
    logits=st.lists(st.sampled_from(LOGITS), min_size=1, max_size=9).filter(lambda x: max(x) > -9),
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.5]),
    top_k=st.integers(0, 10),
    top_p=st.sampled_from([0.0, 0.123, 0.501, 0.87, 1.0]),
)
def test_the_rule_keeps_what_sorting_keeps(
    logits: list[float], temperature: float, top_k: int, top_p: float
) -> None:
    """Temperature, top-k with ties by lowest index, top-p with the crossing token; shares within 1e-9."""
    weights = token_weights(torch.tensor([logits]), temperature, top_k, top_p)[0]
    wanted = kept_tokens(logits, temperature, top_k, top_p)
    assert {i for i, w in enumerate(weights.tolist()) if w} == set(wanted)
    for token, share in wanted.items():
        assert math.isclose(int(weights[token]) / int(weights.sum()), share, abs_tol=1e-9)


def test_the_crossing_token_is_kept_and_the_next_is_not() -> None:
    """Four equal shares: a top_p of exactly 1/2 keeps two tokens, any more keeps three, 0 keeps one."""
    logits = torch.zeros(1, 4)
    for top_p, kept in ((0.0, 1), (0.25, 1), (0.5, 2), (0.51, 3), (0.75, 3), (1.0, 4)):
        wanted = [index < kept for index in range(4)]
        assert token_weights(logits, 1.0, 0, top_p)[0].gt(0).tolist() == wanted


def test_top_p_is_a_share_of_what_top_k_left() -> None:
    """Of shares .4 .3 .2 .1, two by top-k are 4/7 and 3/7: top_p 0.5 keeps the first alone, 0.6 both."""
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()
    assert token_weights(logits, 1.0, 2, 0.5)[0].gt(0).tolist() == [True, False, False, False]
    assert token_weights(logits, 1.0, 2, 0.6)[0].gt(0).tolist() == [True, True, False, False]
    assert token_weights(logits, 1.0, 0, 0.5)[0].gt(0).tolist() == [True, True, False, False]


def test_weights_of_any_vocabulary_sum_below_two_to_53() -> None:
    """Equal logits are the largest sum there is."""
    for vocab in (1, 2, 3, 1000, 1024, 1025, 131072):
        total = int(token_weights(torch.zeros(1, vocab), 1.0, 0, 1.0).sum())
        assert (1 << 51) <= total < (1 << 53)


def test_rows_without_a_largest_number_draw_minus_one() -> None:
    """NaN, +inf and nothing but -inf weigh nothing, at any temperature."""
    rows = torch.tensor([[math.nan, 1.0], [math.inf, 1.0], [-math.inf, -math.inf], [0.0, -math.inf]])
    for temperature in (0.0, 1.0):
        weights = token_weights(rows, temperature, 1, 0.9)
        assert sample_from_weights(weights, torch.arange(4), 0).tolist() == [-1, -1, -1, 0]


@given(st.integers(-(1 << 63), (1 << 63) - 1), st.integers(-(1 << 63), (1 << 63) - 1))
def test_the_generator_is_splitmix_in_whole_numbers(seed: int, offset: int) -> None:
    """torch's signed, wrapping operations give what unsigned Python integers give."""

    def mix(z: int) -> int:
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & BITS
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & BITS
        return z ^ (z >> 31)

    golden = 0x9E3779B97F4A7C15
    wanted = (mix((mix((seed + golden) & BITS) + offset * golden) & BITS) >> 11) * 2.0**-53
    assert uniform(torch.tensor([seed]), offset).item() == wanted
    assert uniform(torch.tensor([seed]), torch.tensor([offset])).item() == wanted
    assert 0.0 <= wanted < 1.0


def test_one_seed_gives_each_row_its_own_stream() -> None:
    """The first row's seed is the given one; the others are all different."""
    seeds = row_seeds(11, torch.empty(1000, 1))
    assert seeds[0] == 11
    assert len(set(seeds.tolist())) == 1000


def test_the_ends_of_the_draw_stay_on_the_tokens() -> None:
    """The lowest point falls on the first token that weighs, the highest on the last, never beside."""
    weights = torch.tensor([[0, 3, 0, 5, 0]])
    drawn = {int(sample_from_weights(weights, seed, 0)) for seed in range(200)}
    assert drawn == {1, 3}
