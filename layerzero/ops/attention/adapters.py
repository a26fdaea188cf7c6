"""What adapters of attention libraries share: arguments as a record, offsets as these libraries take them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from layerzero.ops.attention.arguments import AttentionArgs, MlaArgs, PagedArgs, RaggedArgs
from layerzero.ops.host_copies import max_seqlen

Result = Tensor | tuple[Tensor, Tensor]
A = TypeVar("A", AttentionArgs, RaggedArgs, PagedArgs, MlaArgs)


def takes(kind: type[A]) -> Callable[[Callable[[A], Result]], Callable[..., Result]]:
    """Make a function of one call into one of the op's positional arguments."""

    def of(run: Callable[[A], Result]) -> Callable[..., Result]:
        make = kind._make

        @functools.wraps(run)
        def call(*args: Any) -> Result:
            return run(make(args))

        return call

    return of


def int32(values: Tensor) -> Tensor:
    """Index values as int32 one behind the other; a copy only where they are not."""
    return values.to(torch.int32).contiguous()


def bounds(call: RaggedArgs) -> tuple[Tensor, Tensor, int, int]:
    """Offsets of queries and of keys, and the longest of each."""
    longest_q = max_seqlen(call.cu_seqlens_q, call.q.shape[0])
    longest_k = max_seqlen(call.cu_seqlens_k, call.k.shape[0])
    return int32(call.cu_seqlens_q), int32(call.cu_seqlens_k), longest_q, longest_k
