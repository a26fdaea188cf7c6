"""Looking rows up in a table: embedding."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from layerzero.ops import checks
from layerzero.ops.batching import RowBatching
from layerzero.ops.describe import describe, estimate
from layerzero.ops.op import Args, define_op
from layerzero.ops.signature import IndexTensor, SignedCall, op_signature
from layerzero.spec.call_spec import CallSpec, OutputSpec


@op_signature()
def embedding(ids: IndexTensor, weight: Tensor, *, padding_idx: int | None = None) -> SignedCall:
    """The row of `weight` for each id.

    Args: ids (...), int32 or int64, each in [0, V); weight (V, C), any float dtype; padding_idx: the row that
        gets no gradient, negative counts from the end.
    Returns: (..., C) in weight's dtype.
    Raises: ValueError, TypeError: an argument does not fit, by name; on the CPU also an id out of range, with
        its position. On other devices the range is the kernel's to check, since reading ids would wait.
    """
    raise NotImplementedError


def _check(args: Args) -> CallSpec:
    ids, weight, padding_idx = args
    checks.need_index("ids", ids)
    checks.need_tensor("weight", weight, rank=2)
    checks.need_same_device("ids", ids, weight=weight)
    entries, width = weight.shape
    if padding_idx is not None:
        checks.need_int("padding_idx", padding_idx, low=-entries, high=entries - 1)
    dims, features = {"N": ids.numel(), "V": entries, "C": width}, {"padding_idx": padding_idx is not None}
    return describe("embedding", args[:2], dims, features, dtype=checks.dtype_name(weight.dtype))


def embedding_reference(ids: Tensor, weight: Tensor, padding_idx: int | None) -> Tensor:
    """weight[ids]; the padding row stays out of the gradient."""
    return F.embedding(ids, weight, padding_idx)


def _validate_values(args: Args) -> Args:
    ids, weight, padding_idx = args
    return checks.ids_in_range("ids", ids, weight.shape[0], "weight's rows"), weight, padding_idx


EMBEDDING = define_op(
    build=embedding,
    check=_check,
    reference=embedding_reference,
    outputs=lambda args: (OutputSpec((*args[0].shape, args[1].shape[1]), checks.dtype_name(args[1].dtype)),),
    # Rows are read and written once; ids are eight bytes at most.
    work=estimate(lambda N, C: (0, 2 * N * C, 8 * N)),
    operands=(0, 1),
    exact_dims=frozenset({"V", "C"}),
    validate_values=_validate_values,
    batching=RowBatching(trailing_axes=0),
)
