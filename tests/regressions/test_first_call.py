"""What the first call of a process makes wait for it."""

import os
import subprocess
import sys
from pathlib import Path

# `import torch` leaves CPython's collector some 11,500 container objects away from a full collection, which
# takes 70 ms over its own objects. What we import and make up to the end of the first call stays below that.
CODE = """
import gc, torch
full = []
gc.callbacks.append(lambda phase, info: full.append(phase) if info["generation"] == 2 else None)
q = torch.zeros(1, 4, 16, 32)
import layerzero as lz
lz.sync.attention(q, q, q)
print(len(full))
more = []
while not full and len(more) < 100_000:
    more.append([])
print(len(more))
"""


def test_the_first_call_owes_the_collector_no_full_collection(tmp_path: Path) -> None:
    """None falls due in between, not even where nothing has been compiled yet; one would have been seen."""
    cold = {**os.environ, "HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True, env=cold)
    collections, left = map(int, done.stdout.split())
    assert collections == 0, "a full collection; what was imported that a first call does not need?"
    assert left < 100_000
