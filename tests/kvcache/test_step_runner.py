"""Steps of a model over pages by static buffers and buckets: the rows of `forward` in any company."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import layerzero as lz
from layerzero.kvcache import AttentionMetadata, KVCacheSpec, PagedCache, PagedSequence, TokenRange
from layerzero.runtime import current

HEADS, WIDTH, PAGE = 2, 8, 4


@pytest.fixture(autouse=True)
def own_runtime() -> Iterator[None]:
    """A runtime of the test's own."""
    with lz.start(lz.Settings(warm="off", perfdb=None)):
        yield


class Model:
    """One layer of attention over pages: what a row becomes depends on every token before it."""

    def __init__(
        self, pages: int = 64, width: int = WIDTH, device: str = "cpu", dtype: torch.dtype = torch.float32
    ) -> None:
        spec = KVCacheSpec(num_kv_heads=HEADS, head_dim=width, dtype=dtype, device=device)
        self.cache = PagedCache(spec, pages=pages, page_size=PAGE)
        table = torch.randn(50, HEADS, width, generator=torch.Generator().manual_seed(3))
        self.table = table.to(device, dtype)
        self.calls: list[int] = []

    def forward(self, metadata: AttentionMetadata, ids: Tensor, *values: Tensor) -> Tensor:
        """(B, HEADS * WIDTH) of each sequence's last row, and its values behind them."""
        self.calls.append(ids.shape[0])
        x = self.table[ids]
        k_cache, v_cache = self.cache.pools[0]
        lz.sync.append_kv(x, x * 2, k_cache, v_cache, metadata.slot_mapping)
        out = lz.sync.paged_attention(
            x, k_cache, v_cache, metadata.block_tables, metadata.seq_lens, cu_seqlens_q=metadata.cu_seqlens_q
        )
        return torch.cat([out.flatten(1)[metadata.logits_indices], *values], -1)

    def plain(self, ranges: list[TokenRange], ids: Tensor, *values: Tensor) -> Tensor:
        """What a runner has to return."""
        return self.forward(self.cache.attention_metadata(ranges), ids, *values)


def opened(cache: PagedCache, lengths: list[int]) -> list[PagedSequence]:
    """Sequences that hold so many tokens of anything."""
    sequences = [cache.sequence(40) for _ in lengths]
    for sequence, length in zip(sequences, lengths, strict=True):
        if length:
            sequence.extend(length)
    for pool in cache.pools[0]:
        pool.normal_(generator=torch.Generator(cache.device).manual_seed(1))
    return sequences


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 12), st.sampled_from([1, 1, 1, 2, 5])), min_size=1, max_size=7),
    st.integers(0, 2), st.sampled_from([(1, 4), (1, 2, 3), (8,)]), st.sampled_from([(), (8,), (4, 12, 40)]),
)  # fmt: skip
def test_every_row_is_that_of_the_plain_step(
    rows: list[tuple[int, int]], arity: int, buckets: tuple[int, ...], prefill_buckets: tuple[int, ...]
) -> None:
    """Decode and prefill rows in any order and number, beyond the largest bucket too; nothing is left."""
    model = Model(128)
    free = model.cache.allocator.free
    runner = lz.StepRunner(
        model.forward, model.cache, max_model_len=20, max_num_seqs=8, buckets=buckets, graphs=True,
        prefill_buckets=prefill_buckets,
    )  # fmt: skip
    sequences = opened(model.cache, [length for length, _ in rows])
    for turn in range(2):
        ranges = [sequence.extend(count) for sequence, (_, count) in zip(sequences, rows, strict=True)]
        ids = torch.arange(sum(count for _, count in rows)) * 7 % 50
        values = tuple(torch.randn(len(rows), 3) for _ in range(arity))
        expected = model.plain(ranges, ids, *values)
        torch.testing.assert_close(runner(ranges, ids, *values), expected, msg=f"turn {turn}")
    for sequence in sequences:
        sequence.close()
    runner.close()
    assert model.cache.allocator.free == free


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("counts", [(1, 1), (4, 1, 5), (16, 3), (17, 2), (30,)])
def test_all_positions_are_those_of_the_plain_step(counts: tuple[int, ...], graphs: bool) -> None:
    """A row for each token, whose keys end with it; few tokens a sequence are rows of the decoding graph."""
    model = Model(128)
    runner = lz.StepRunner(model.forward, model.cache, max_model_len=40, max_num_seqs=8, graphs=graphs)
    sequences = opened(model.cache, [6, 0, 3][: len(counts)])
    ranges = [sequence.extend(count) for sequence, count in zip(sequences, counts, strict=True)]
    ids = torch.arange(sum(counts)) * 7 % 50
    metadata = replace(model.cache.attention_metadata(ranges), logits_indices=slice(None))
    expected = model.forward(metadata, ids)
    torch.testing.assert_close(runner.all_positions(ranges, ids), expected)
    assert bool(runner.captures) == (graphs and max(counts) <= 16)
    with pytest.raises(ValueError, match="input_ids needs shape"):
        runner.all_positions(ranges, ids[1:])


def test_a_sequence_that_gets_another_page_is_seen() -> None:
    """The tables of a crowd that stays are written again when one of them changes."""
    model = Model()
    runner = lz.StepRunner(model.forward, model.cache, max_model_len=40, max_num_seqs=2, graphs=True)
    sequence = model.cache.sequence(1)
    for number in range(3 * PAGE):
        span = sequence.extend(1)
        ids = torch.tensor([number])
        torch.testing.assert_close(runner([span], ids), model.plain([span], ids))


@pytest.mark.parametrize("graphs", [False, True])
def test_the_same_rows_again_read_a_table_that_has_changed(graphs: bool) -> None:
    """A step that is run again after a page of it was copied for a fork reads and writes the copy."""
    model = Model()
    runner = lz.StepRunner(model.forward, model.cache, max_model_len=40, max_num_seqs=2, graphs=graphs)
    (sequence,) = opened(model.cache, [6])
    ranges, ids = [sequence.extend(1)], torch.tensor([3])
    runner(ranges, ids)
    fork = model.cache.fork(sequence.number)
    sequence.extend(1)  # its last page is its own from here on
    torch.testing.assert_close(runner(ranges, ids), model.plain(ranges, ids))
    before = model.cache.read(fork)[0].clone()
    runner(ranges, torch.tensor([9]))
    assert torch.equal(model.cache.read(fork)[0], before), "the row was written into the fork's page"


def test_rows_of_padding_write_nothing_of_others() -> None:
    """A bucket that is not full leaves every page of a sequence as it is."""
    model = Model()
    runner = lz.StepRunner(
        model.forward, model.cache, max_model_len=40, max_num_seqs=8, buckets=(8,), graphs=True
    )
    sequences = opened(model.cache, [5, 9])
    before = [
        model.cache.read(sequence.number)[0][:length].clone()
        for sequence, length in zip(sequences, (5, 9), strict=True)
    ]
    runner([sequence.extend(1) for sequence in sequences], torch.tensor([1, 2]))
    for sequence, length, keys in zip(sequences, (5, 9), before, strict=True):
        assert torch.equal(model.cache.read(sequence.number)[0][:length], keys[:length])


def test_a_step_with_prompts_is_one_run_of_all_rows() -> None:
    """Prompts and rows that decode run together in the smallest bucket that holds them; captured ahead, a
    step captures nothing; without a bucket that is large enough it runs as it comes."""
    model = Model(128)
    runner = lz.StepRunner(
        model.forward, model.cache, max_model_len=40, max_num_seqs=4, buckets=(4,), graphs=True,
        prefill_buckets=(8, 16),
    )  # fmt: skip
    sequences = opened(model.cache, [3, 5, 0])
    before = [model.cache.read(sequence.number)[0].clone() for sequence in sequences[:2]]
    runner.capture()
    assert runner.captures == 3
    for sequence, keys in zip(sequences, before, strict=False):
        assert torch.equal(model.cache.read(sequence.number)[0], keys), "capturing wrote into a sequence"
    for counts, rows in (((1, 1, 3), 8), ((1, 1, 12), 16), ((1, 1, 15), 17)):
        ranges = [sequence.extend(count) for sequence, count in zip(sequences, counts, strict=True)]
        ids = torch.arange(sum(counts)) % 50
        model.calls.clear()
        found = runner(ranges, ids)
        assert model.calls == [rows]
        torch.testing.assert_close(found, model.plain(ranges, ids))
    assert runner.captures == 3
    with pytest.raises(ValueError, match=r"prefill_buckets needs some of \(8, 16\), got 9"):
        runner.capture(prefill_buckets=[9])


def test_rows_of_padding_beside_a_prompt_write_nothing_of_others() -> None:
    """A bucket that is nearly empty leaves every page of a sequence as it is."""
    model = Model()
    runner = lz.StepRunner(
        model.forward, model.cache, max_model_len=40, max_num_seqs=2, graphs=True, prefill_buckets=(64,)
    )
    first, second = opened(model.cache, [5, 9])
    before = [model.cache.read(sequence.number)[0].clone() for sequence in (first, second)]
    runner([first.extend(3)], torch.tensor([1, 2, 3]))
    assert torch.equal(model.cache.read(second.number)[0], before[1])
    assert torch.equal(model.cache.read(first.number)[0][:5], before[0])


def test_prompts_run_as_they_come_where_a_kernel_may_not_be_captured(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The step is answered, the event says why, and no later step tries again."""
    model = Model()
    runner = lz.StepRunner(
        model.forward, model.cache, max_model_len=40, max_num_seqs=2, graphs=True, prefill_buckets=(8,)
    )
    (sequence,) = opened(model.cache, [2])

    def refuse(*args: Any, **named: Any) -> Any:
        raise lz.CudaGraphUnsafeError("paged_attention has no kernel that may be captured")

    with monkeypatch.context() as patch:
        patch.setattr("layerzero.graphs.step.EagerStep", refuse)
        ranges, ids = [sequence.extend(3)], torch.tensor([1, 2, 3])
        with caplog.at_level(logging.WARNING):
            torch.testing.assert_close(runner(ranges, ids), model.plain(ranges, ids))
    assert "step_runner.prefill_not_captured" in caplog.text and runner.prefill_buckets == ()
    ranges = [sequence.extend(2)]
    torch.testing.assert_close(runner(ranges, ids[:2]), model.plain(ranges, ids[:2]))
    assert runner.captures == 0


@pytest.mark.parametrize("rows", [0, -1, True, 2.0])
def test_a_bucket_of_prompts_is_a_number_of_rows(rows: Any) -> None:
    """Anything else is refused by name."""
    model = Model()
    with pytest.raises((ValueError, TypeError), match="prefill_buckets needs"):
        lz.StepRunner(model.forward, model.cache, max_model_len=8, prefill_buckets=(rows,))


def test_long_sequences_and_prompts_run_without_a_graph() -> None:
    """What no bucket serves runs as it comes; the runner says how many graphs it has."""
    model = Model()
    runner = lz.StepRunner(model.forward, model.cache, max_model_len=8, max_num_seqs=4, graphs=True)
    (short, long) = opened(model.cache, [3, 8])
    model.calls.clear()
    runner([long.extend(1)], torch.tensor([1]))
    runner([short.extend(3)], torch.tensor([1, 2, 3]))
    assert runner.captures == 0 and model.calls == [1, 3]
    runner([short.extend(1)], torch.tensor([1]))
    assert runner.captures == 1


def test_buckets_are_captured_ahead() -> None:
    """`capture` makes every bucket; the steps that follow capture nothing."""
    model = Model()
    runner = lz.StepRunner(model.forward, model.cache, max_model_len=40, max_num_seqs=6, graphs=True)
    assert runner.buckets == (1, 2, 4, 6)
    runner.capture(buckets=[4])
    assert runner.captures == 1
    with pytest.raises(ValueError, match=r"buckets needs some of \(1, 2, 4, 6\), got 3"):
        runner.capture(buckets=[3])
    runner.capture()
    assert runner.captures == 4
    sequences = opened(model.cache, [3, 4, 5])
    runner([sequence.extend(1) for sequence in sequences], torch.tensor([1, 2, 3]))
    assert runner.captures == 4


def test_a_table_that_grows_is_captured_once_for_each_width() -> None:
    """Every length up to the limit is the plain step's, by three graphs: one for each width of tables."""
    model = Model(128)
    runner = lz.StepRunner(
        model.forward, model.cache, max_model_len=60, max_num_seqs=2, buckets=(2,), table_widths=(2, 6),
        graphs=True,
    )  # fmt: skip
    assert runner.table_widths == (2, 6, 15)
    sequence, other = model.cache.sequence(1), model.cache.sequence(1)
    other.extend(1)
    seen: list[int] = []
    for number in range(60):
        ranges, ids = [sequence.extend(1)], torch.tensor([number % 50])
        torch.testing.assert_close(runner(ranges, ids), model.plain(ranges, ids))
        seen.append(runner.captures)
    assert seen == [1] * 8 + [2] * 16 + [3] * 36
    ranges, ids = [other.extend(1)], torch.tensor([3])  # a short one again: its graph is there
    torch.testing.assert_close(runner(ranges, ids), model.plain(ranges, ids))
    assert runner.captures == runner.kept == 3 and runner.evictions == 0


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 6])
@pytest.mark.parametrize("longest", [1, 7, 8, 23, 24, 59])
def test_a_replay_in_each_bucket_is_the_plain_step(rows: int, longest: int) -> None:
    """Rows below and at a bucket's edge, tables below and at a width's; the first graph, and it again."""
    model = Model(256)
    runner = lz.StepRunner(
        model.forward, model.cache, max_model_len=60, max_num_seqs=6, buckets=(1, 3, 6), table_widths=(2, 6),
        graphs=True,
    )  # fmt: skip
    runner.capture()
    assert runner.captures == 9
    sequences = opened(model.cache, [longest, *range(rows - 1)])
    ranges, ids = [sequence.extend(1) for sequence in sequences], torch.arange(rows)
    for _ in range(2):
        torch.testing.assert_close(runner(ranges, ids), model.plain(ranges, ids))
    assert runner.captures == 9


def test_a_thousand_shapes_keep_no_more_than_the_bound() -> None:
    """Of 1,000 shapes eight graphs stay, with their memory; what went is captured again, and right."""
    model = Model()
    alive: dict[int, Any] = {}

    def forward(metadata: AttentionMetadata, ids: Tensor, value: Tensor) -> Tensor:
        number = id(value)
        alive[number] = weakref.ref(value, lambda _: alive.pop(number, None))
        return model.forward(metadata, ids, value)

    runner = lz.StepRunner(forward, model.cache, max_model_len=20, max_num_seqs=1, max_graphs=8, graphs=True)
    (sequence,) = opened(model.cache, [3])
    ranges, ids, most = [sequence.extend(1)], torch.tensor([4]), 0
    for width in range(1, 1001):
        runner(ranges, ids, torch.ones(1, width))
        most = max(most, len(alive), runner.kept)
    assert most <= 9 and runner.kept == 8  # one more while the next is captured
    assert runner.captures == 1000 and runner.evictions == 992
    counted = current().counters.total("graph_evictions")
    assert counted == 992
    value = torch.randn(1, 5)
    torch.testing.assert_close(runner(ranges, ids, value), model.plain(ranges, ids, value))
    assert runner.captures == 1001


def test_what_was_used_last_stays() -> None:
    """The longest unused graph goes, not the oldest."""
    model = Model()
    runner = lz.StepRunner(
        model.forward, model.cache, max_model_len=20, max_num_seqs=1, max_graphs=2, graphs=True
    )
    (sequence,) = opened(model.cache, [3])
    ranges, ids = [sequence.extend(1)], torch.tensor([4])
    for width in (1, 2, 1, 3, 1):
        runner(ranges, ids, torch.ones(1, width))
    assert runner.captures == 3 and runner.evictions == 1


def test_a_bound_of_bytes_holds_and_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """Graphs that together take more than the bound go, each with an event with the reason; one stays."""
    model = Model()
    runner = lz.StepRunner(
        model.forward, model.cache, max_model_len=20, max_num_seqs=1, max_graph_bytes=10_000, graphs=True
    )
    (sequence,) = opened(model.cache, [3])
    ranges, ids = [sequence.extend(1)], torch.tensor([4])
    with caplog.at_level(logging.INFO, "layerzero"):
        for width in range(500, 520):
            runner(ranges, ids, torch.ones(1, width))
        assert runner.kept == 2  # each holds its value, and that again in its result
        runner(ranges, ids, torch.ones(1, 4000))
        assert runner.kept == 1
    told = [text for text in caplog.messages if text.startswith("graph.evicted")]
    assert len(told) == runner.evictions == 20
    assert all("why='more than 10000 bytes'" in text for text in told)


def test_on_the_cpu_nothing_is_padded_by_default() -> None:
    """Padding would only cost there."""
    model = Model()
    free = model.cache.allocator.free
    runner = lz.StepRunner(model.forward, model.cache, max_model_len=40)
    assert model.cache.allocator.free == free
    runner.capture()
    (sequence,) = opened(model.cache, [3])
    runner([sequence.extend(1)], torch.tensor([1]))
    assert model.calls == [1] and runner.captures == 0


def test_bad_arguments_are_named() -> None:
    """Limits, buckets, rows and values that do not fit."""
    model = Model()
    with pytest.raises(ValueError, match="max_model_len needs an int >= 1, got 0"):
        lz.StepRunner(model.forward, model.cache, max_model_len=0)
    with pytest.raises(ValueError, match=r"buckets needs .* from 1 to max_num_seqs 4, got \(8,\)"):
        lz.StepRunner(model.forward, model.cache, max_model_len=8, max_num_seqs=4, buckets=(8,))
    with pytest.raises(ValueError, match=r"table_widths needs pages from 1 to 2, .* got 3"):
        lz.StepRunner(model.forward, model.cache, max_model_len=8, table_widths=(3,))
    with pytest.raises(ValueError, match="max_graphs needs an int >= 1, got 0"):
        lz.StepRunner(model.forward, model.cache, max_model_len=8, max_graphs=0)
    with pytest.raises(ValueError, match="max_graph_bytes needs an int >= 1, got True"):
        lz.StepRunner(model.forward, model.cache, max_model_len=8, max_graph_bytes=True)
    with pytest.raises(ValueError, match=r"table_widths needs some of \(2,\), got 1"):
        lz.StepRunner(model.forward, model.cache, max_model_len=8).capture(table_widths=[1])
    runner = lz.StepRunner(model.forward, model.cache, max_model_len=8)
    (sequence,) = opened(model.cache, [3])
    span = sequence.extend(2)
    with pytest.raises(ValueError, match=r"input_ids needs shape \(2,\), .* got \(3,\)"):
        runner([span], torch.tensor([1, 2, 3]))
    with pytest.raises(ValueError, match=r"values needs 1 rows each, got shape \(2,\)"):
        runner([span], torch.tensor([1, 2]), torch.ones(2))
    with pytest.raises(ValueError, match="input_ids needs"):
        runner([], torch.tensor([], dtype=torch.long))
