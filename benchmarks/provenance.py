"""Where a number comes from: the script and its options, the commit, whether the tree was clean, the machine.

Every record under `benchmarks/results` has these four; `tests/benchmarks/test_provenance.py` refuses others.
A copy of the tree without its history, or with another one, takes the commit from LZ_SOURCE_COMMIT, set by
whoever copied a clean tree.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
# What a benchmark or the tables made of it write themselves.
WIDEST = (("amx", "AMX"), ("avx512", "AVX-512"), ("avx2", "AVX2"))
WRITTEN = (":!benchmarks/results", ":!docs", ":!README.md")


def provenance() -> dict[str, Any]:
    """`script`, `commit`, `clean` and `machine`; commit and clean are None where nobody knows."""
    changed: str | None = ""
    commit = os.environ.get("LZ_SOURCE_COMMIT") or None
    if commit is None:
        commit = git("rev-parse", "HEAD")
        changed = git("status", "--porcelain", "--untracked-files=no", "--", ".", *WRITTEN)
    return {
        "script": command(),
        "commit": commit,
        "clean": None if changed is None else not changed,
        "machine": machine(),
    }


def command() -> str:
    """How this process was started, with paths relative to the checkout."""
    words = [os.path.basename(sys.orig_argv[0]), *sys.orig_argv[1:]]
    return " ".join(word.replace(f"{ROOT}/", "") for word in words)


def machine() -> str:
    """The class of machine that a number holds for, as the shipped tables have it."""
    import torch

    from layerzero.perfdb.record import Environment
    from layerzero.spec.hardware import probe

    cpu = Environment.of_hardware(probe("cpu"))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    widest = next((name for prefix, name in WIDEST if any(i.startswith(prefix) for i in cpu.isa)), "no AVX2")
    words = f"{cores} cores of a CPU by {cpu.vendor} with {widest}"
    if not torch.cuda.is_available():
        return words
    return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}, {words}"


def git(*arguments: str) -> str | None:
    """What git says in the checkout; None without git or without a checkout."""
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()
