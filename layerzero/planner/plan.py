"""`plan`: a block with its kernels, layouts, dtypes and fusions chosen together, ready to be called."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from layerzero.calls.blocking import context_snapshot
from layerzero.planner.block import Block
from layerzero.planner.plan_file import read_plans
from layerzero.planner.planned import PlannedBlock, device_of
from layerzero.planner.search import BEAM


def plan(
    block: Callable[..., Any] | Block | fx.Graph,
    /,
    *args: Any,
    warm: bool = True,
    measure: str | bool = False,
    beam: int = BEAM,
    **kwargs: Any,
) -> PlannedBlock:
    """A block with kernels, layouts, dtypes and fusions chosen together for these arguments, to be called.

    Args: block is a function or module that is traced with the arguments, a graph of torch.fx, or a `Block`.
        Tensors among the arguments are its inputs; whatever else it holds, its weights, is part of it.
        warm loads and compiles what would be chosen when warm, first. measure times the plan beside the ones
        with fewer fusions and keeps the fastest: "eager", or "graph" as a CUDA graph is replayed; True is
        "eager". The block then runs some hundred times on these very arguments. beam is how many partial
        plans the search keeps for each number of ops done.
    Raises: BlockError: the block cannot be planned, with a reason code. NoKernelFoundError: an op has no
        kernel. ValueError, TypeError: an argument is wrong, by name.

    Example:
        >>> import torch, layerzero as lz
        >>> weight = torch.ones(8)
        >>> def block(x, residual):
        ...     total = x + residual
        ...     return lz.sync.rms_norm(total, weight), total
        >>> with lz.start(scoped=True):
        ...     planned = lz.plan(block, torch.ones(2, 8), torch.ones(2, 8))
        ...     normed, total = planned(torch.ones(2, 8), torch.ones(2, 8))
        ...     planned.record.fused_ops
        (('add', 'rms_norm'),)
    """
    launch = _need_options(measure, beam)
    planned = PlannedBlock(_need_block(block), beam=beam, measure=launch)
    planned.prepare(args, kwargs, warm=warm)
    return planned


def load_plan(
    path: str | os.PathLike[str], block: Callable[..., Any] | Block | fx.Graph, /, *args: Any, **kwargs: Any
) -> PlannedBlock:
    """A block with the plans of a file, as `PlannedBlock.save` wrote it; the block is given as to `plan`.

    Raises: PlanRefusedError: the file is old, damaged, or of another machine, block or policy, or a kernel in
        it does not take its call now; each problem has a reason code. OSError: there is no such file.
    """
    tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    device = device_of(tensors)
    device.wait_for_costs()
    state = context_snapshot(device, "", None)
    saved = read_plans(path, device, state.policy.digest)
    planned = PlannedBlock(_need_block(block), path=os.fspath(path), saved=saved)
    planned.prepare(args, kwargs, load=True)
    return planned


def _need_block(block: Any) -> Callable[..., Any] | Block:
    if isinstance(block, fx.Graph):
        return fx.GraphModule(torch.nn.Module(), block)
    if isinstance(block, Block) or callable(block):
        source: Callable[..., Any] | Block = block
        return source
    raise TypeError(f"plan needs a function, a torch.fx graph or a Block, got {type(block).__name__}")


def _need_options(measure: Any, beam: Any) -> str:
    if isinstance(beam, bool) or not isinstance(beam, int) or beam < 1:
        raise ValueError(f"beam needs an int >= 1, got {beam!r}")
    if measure not in (False, True, "eager", "graph"):
        raise ValueError(f"measure needs False, True, 'eager' or 'graph', got {measure!r}")
    return "eager" if measure is True else measure or ""
