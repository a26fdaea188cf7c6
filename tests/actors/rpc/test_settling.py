"""The numbers of a client's requests, and tensors that live elsewhere."""

from __future__ import annotations

import pytest
import torch

from layerzero.actors.rpc.settling import RequestNumbers
from layerzero.actors.rpc.tensors import RemoteTensorStore


def test_every_settled_number_is_sent_in_messages_of_a_bounded_size() -> None:
    """A request that stays out holds the watermark: those behind it are named, each once."""
    numbers = RequestNumbers()
    for number in [numbers.new_number() for _ in range(601)][1:]:
        numbers.ack(number)
    assert (numbers.ack_watermark, numbers.outstanding) == (0, 1)
    sent = [numbers.take_acks() for _ in range(4)]
    assert [len(each) for each in sent] == [256, 256, 88, 0]
    assert sorted(number for each in sent for number in each) == list(range(1, 601))
    numbers.ack(0)
    assert (numbers.ack_watermark, numbers.take_acks()) == (601, ())


def test_a_handle_that_has_no_tensor_here_says_why() -> None:
    """Of another device, freed, or lost with the process that had it: three things to do."""
    store = RemoteTensorStore("gpu-0", "now")
    kept = store.add(torch.ones(2))
    assert torch.equal(store.get(kept), torch.ones(2))
    with pytest.raises(ValueError, match=r"move it with await pool.ship\(handle, to='gpu-0'\)"):
        store.get(RemoteTensorStore("gpu-1", "now").add(torch.ones(2)))
    with pytest.raises(LookupError, match="was lost with an earlier incarnation"):
        store.get(RemoteTensorStore("gpu-0", "before").add(torch.ones(2)))
    store.free(kept.key)
    with pytest.raises(LookupError, match="was freed"):
        store.get(kept)
    assert len(store) == 0
