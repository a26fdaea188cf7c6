"""Distributed tensors: replicated and sharded, right numbers or a refusal by name; on two processes."""

from __future__ import annotations

from pathlib import Path

from tests import children

RANK = """
import sys, torch, torch.distributed as dist
import layerzero as lz
rank, store = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
mesh = init_device_mesh("cpu", (2,))
torch.manual_seed(0)
x, weight, matrix, q = torch.randn(4, 8), torch.randn(8), torch.randn(6, 8), torch.randn(2, 4, 6, 8)
whole = lambda t, p=Replicate(): distribute_tensor(t, mesh, [p])
for placement in (Replicate(), Shard(0), Shard(1)):
    for run in (lz.sync.rms_norm, torch.ops.layerzero.rms_norm):
        normed = run(whole(x, placement), whole(weight)).full_tensor()
        torch.testing.assert_close(normed, lz.sync.rms_norm(x, weight))
    got = lz.sync.linear(whole(x, placement), whole(matrix)).full_tensor()
    torch.testing.assert_close(got, lz.sync.linear(x, matrix))
    sharded = whole(q, placement)
    seen = lz.sync.attention(sharded, sharded, sharded, is_causal=True)
    assert seen.placements == (placement,)
    torch.testing.assert_close(seen.full_tensor(), lz.sync.attention(q, q, q, is_causal=True))
grouped, keys, few = torch.randn(2, 12, 5, 8), torch.randn(2, 6, 5, 8), torch.randn(2, 3, 5, 8)
seen = lz.sync.attention(whole(grouped, Shard(1)), whole(keys, Shard(1)), whole(keys, Shard(1)))
torch.testing.assert_close(seen.full_tensor(), lz.sync.attention(grouped, keys, keys))
split, odd = whole(grouped, Shard(1)), whole(few, Shard(1))
seen = lz.sync.attention(odd, odd, odd)
torch.testing.assert_close(seen.full_tensor(), lz.sync.attention(few, few, few))
tokens = whole(q, Shard(2))
refusals = {
    "k needs a number of heads that 2 shards divide": lambda: lz.sync.attention(split, odd, odd),
    "q needs to be replicated or sharded along": lambda: lz.sync.attention(tokens, tokens, tokens),
    "rms_norm needs tensors for which plain torch can": lambda: lz.sync.rms_norm(whole(x), weight),
}
for error, run in refusals.items():
    try:
        run()
    except TypeError as refused:
        assert error in str(refused), refused
    else:
        raise AssertionError(error)
dist.barrier()
dist.destroy_process_group()
print("fine")
"""


def test_two_ranks_compute_what_one_does(tmp_path: Path) -> None:
    """Norms, products and attention over replicas and shards; tokens in shards are refused."""
    ranks = [children.Child(RANK, str(rank), str(tmp_path / "store"), folder=tmp_path) for rank in range(2)]
    for done in [rank.ended() for rank in ranks]:
        assert done.stdout.strip() == "fine", done.stderr
