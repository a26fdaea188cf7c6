"""Host copies of index tensors: they hold while the tensor stands, and never a moment longer."""

import pytest
import torch
from torch import Tensor

from layerzero.kvcache import KVCacheSpec, PagedCache
from layerzero.ops import host_copies
from layerzero.ops.paged.batching import concat_block_tables, concat_cu_seqlens, concat_index_rows


def known(*values: int, shape: tuple[int, ...] = (-1,)) -> Tensor:
    """A tensor of no memory that remembers `values`; a device whose data nobody can read."""
    here = torch.tensor(values, dtype=torch.int32).view(shape)
    return host_copies.to_device_with_host_copy(here, "meta")


def values_of(tensor: Tensor) -> list[int]:
    """What is noted of a tensor."""
    found = host_copies.host_copy_of(tensor)
    assert found is not None
    return found.values.tolist()


def test_a_copy_answers_without_the_device() -> None:
    """A tensor without data still has its values."""
    assert host_copies.to_host_values(known(3, 5, 9)).tolist() == [3, 5, 9]


@pytest.mark.parametrize("inference", [False, True])
def test_an_edit_in_place_ends_the_copy(inference: bool) -> None:
    """Also one made under inference mode, where torch counts versions of ordinary tensors all the same."""
    tensor = torch.tensor([1, 2, 3])
    host_copies.attach_host_copy(tensor, tensor.clone())
    with torch.inference_mode(inference):
        tensor[1] = 7
    assert host_copies.host_copy_of(tensor) is None
    assert host_copies.to_host_values(tensor).tolist() == [1, 7, 3]


def test_an_edit_through_a_view_ends_the_copy() -> None:
    """Views share the counter with what they view."""
    tensor = torch.tensor([1, 2, 3])
    host_copies.attach_host_copy(tensor, tensor.clone())
    tensor[1:].add_(1)
    assert host_copies.host_copy_of(tensor) is None


def test_an_inference_tensor_is_not_remembered() -> None:
    """It counts no versions, so its copy could go stale unseen."""
    with torch.inference_mode():
        tensor = torch.tensor([1, 2])
        assert host_copies.host_copy_of(host_copies.attach_host_copy(tensor, tensor)) is None
        made = host_copies.to_device_with_host_copy(torch.tensor([4]), "meta")
    assert values_of(made) == [4]


def test_the_longest_sequence_is_asked_of_the_copy_or_bounded() -> None:
    """A device is never asked: where no copy says it, all rows are the bound."""
    offsets = known(0, 3, 3, 10)
    assert host_copies.max_seqlen(offsets, 10) == 7
    host_copies.drop_host_copy(offsets)
    assert host_copies.max_seqlen(offsets, 10) == 10


def test_forgetting_ends_the_copy() -> None:
    """What a kernel of one's own has to call."""
    tensor = known(1)
    host_copies.drop_host_copy(tensor)
    assert host_copies.host_copy_of(tensor) is None


def test_joins_happen_on_the_host_and_are_kept() -> None:
    """The layers of a step get one tensor, as long as no piece and not the result itself has changed."""
    first, second = known(4, 7), known(1)
    made = host_copies.concat_with_host_copies([first, second], concat_index_rows, "lengths")
    assert values_of(made) == [4, 7, 1]
    assert host_copies.concat_with_host_copies([first, second], concat_index_rows, "lengths") is made
    assert host_copies.concat_with_host_copies([second, first], concat_index_rows, "lengths") is not made
    host_copies.drop_host_copy(made)
    assert host_copies.concat_with_host_copies([first, second], concat_index_rows, "lengths") is not made


def test_a_piece_without_copy_is_joined_where_it_lies() -> None:
    """One unknown piece makes the whole unknown."""
    here = torch.tensor([2, 3], dtype=torch.int32)
    made = host_copies.concat_with_host_copies([here, here], concat_index_rows, "lengths")
    assert made.tolist() == [2, 3, 2, 3]
    assert host_copies.host_copy_of(made) is None


def test_tables_of_different_widths_are_stacked_from_their_copies() -> None:
    """Shorter rows end in zeros, as on the device."""
    made = host_copies.concat_with_host_copies(
        [known(5, 6, shape=(1, 2)), known(9, shape=(1, 1))], concat_block_tables, "tables"
    )
    assert values_of(made) == [[5, 6], [9, 0]]


def test_offsets_of_known_callers_are_joined_from_their_copies() -> None:
    """A caller without offsets has one query a sequence."""
    made = concat_cu_seqlens([known(0, 3, 4), None, known(0, 2)], [4, 2, 2], torch.device("meta"))
    assert made is not None
    assert values_of(made) == [0, 3, 4, 5, 6, 8]


def test_a_cache_gives_tables_with_their_copies() -> None:
    """At every epoch anew; the CPU needs none."""
    cache = PagedCache(KVCacheSpec(num_kv_heads=1, head_dim=2), pages=4, page_size=2)
    sequence = cache.new()
    cache.append(sequence, torch.ones(3, 1, 2), torch.ones(3, 1, 2))
    tables, lengths = cache.block_tables([sequence])
    assert host_copies.to_host_values(tables) is tables
    assert lengths.tolist() == [3]
