"""What ranks that share a token believe of a store that other processes can write."""

from __future__ import annotations

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]

from layerzero.actors.group.agreement import propose
from layerzero.actors.remote.stores import TorchStore
from layerzero.spec.errors import ConsistencyError

TOKEN = bytes(range(32))


def test_ranks_with_the_token_read_what_they_wrote() -> None:
    """Values, absent keys and the first of two writers: as in a store without a token."""
    store = HashStore()
    one, other = TorchStore(store, token=TOKEN), TorchStore(store, token=TOKEN)
    one.set("profile/0", b"\x00\xff bytes")
    assert other.get("profile/0", 1.0) == b"\x00\xff bytes"
    assert other.get("profile/1", 0.01) is None
    assert one.compare_set("outcome", b"", b"commit:1") == b"commit:1"
    assert other.compare_set("outcome", b"", b"abort:2") == b"commit:1"
    assert other.wait(["profile/0", "profile/1"], 0.01) == (True, False)


@pytest.mark.parametrize("key", ["profile/0", "outcome", "vote/1"])
def test_a_value_of_another_process_is_refused(key: str) -> None:
    """Whatever way it is read, a value without the ranks' digest raises and names its key."""
    store = HashStore()
    TorchStore(store).set(key, b"commit:1")  # a process that has reached the store
    rank = TorchStore(store, token=TOKEN)
    for read in (
        lambda: rank.get(key, 1.0),
        lambda: rank.wait([key], 1.0),
        lambda: rank.compare_set(key, b"", b"abort:"),
    ):
        with pytest.raises(ConsistencyError, match=key):
            read()


def test_a_value_counts_under_its_own_key_and_token_alone() -> None:
    """A copied value is refused: rank 1's vote is no vote of rank 2, and an earlier epoch's is none."""
    store = HashStore()
    rank = TorchStore(store, token=TOKEN)
    rank.set("vote/1", b"yes")
    raw = TorchStore(store)
    raw.set("vote/2", raw.get("vote/1", 1.0) or b"")
    with pytest.raises(ConsistencyError, match="vote/2"):
        rank.get("vote/2", 1.0)
    with pytest.raises(ConsistencyError, match="vote/1"):
        TorchStore(store, token=TOKEN[::-1]).get("vote/1", 1.0)


def test_a_forged_vote_commits_no_plan() -> None:
    """Rank 0 counts no vote that another process has written for a follower."""
    store = HashStore()
    TorchStore(store).set("p/vote/1", b"yes")
    rank0 = TorchStore(store, token=TOKEN)
    with pytest.raises(ConsistencyError, match="p/vote/1"):
        propose(rank0, "p", b"plan", [1], 1.0)
    assert rank0.get("p/outcome", 0.01) is None
