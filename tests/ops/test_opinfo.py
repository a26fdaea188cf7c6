"""torch's own sample and error inputs for the ops that both have."""

from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch

from layerzero.ops.linear.embedding import EMBEDDING
from layerzero.ops.linear.linear import LINEAR
from layerzero.ops.norm.layer_norm import LAYER_NORM
from layerzero.ops.norm.rms_norm import RMS_NORM
from layerzero.ops.op import Op
from tests.ops.calls import call

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
NORMS = {"nn.functional.rms_norm": RMS_NORM, "nn.functional.layer_norm": LAYER_NORM}


@cache
def info(name: str) -> Any:
    """torch's description of one of its functions."""
    from torch.testing._internal.common_methods_invocations import op_db

    (found,) = [entry for entry in op_db if entry.name == name]
    return found


def samples(name: str, dtype: torch.dtype) -> Iterator[Any]:
    """torch's sample inputs, at least one."""
    given = list(info(name).sample_inputs("cpu", dtype))
    assert given
    yield from given


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", sorted(NORMS))
def test_norms_agree_with_torch(name: str, dtype: torch.dtype) -> None:
    """Norms over several axes are norms over those axes laid flat; a negative eps is refused by name."""
    op, refused = NORMS[name], 0
    for sample in samples(name, dtype):
        shape, *vectors = sample.args
        flat = sample.input.flatten(-len(shape))
        ours = [None if v is None else v.flatten() for v in vectors]
        default = torch.finfo(dtype).eps if op is RMS_NORM else 1e-5
        eps = sample.kwargs.get("eps", default)
        if eps < 0:
            with pytest.raises(ValueError, match="eps needs a finite number"):
                call(op, flat, *ours, eps=eps)
            refused, eps = refused + 1, -eps
        wanted = info(name).op(sample.input, shape, *vectors, eps=eps)
        torch.testing.assert_close(call(op, flat, *ours, eps=eps), wanted.reshape(flat.shape))
    assert refused == 1


@pytest.mark.parametrize("dtype", DTYPES)
def test_linear_agrees_with_torch(dtype: torch.dtype) -> None:
    """Every sample, empty and one-dimensional rows included."""
    for sample in samples("nn.functional.linear", dtype):
        wanted = torch.nn.functional.linear(sample.input, *sample.args)
        torch.testing.assert_close(call(LINEAR, sample.input, *sample.args), wanted)


@pytest.mark.parametrize("dtype", DTYPES)
def test_embedding_agrees_with_torch(dtype: torch.dtype) -> None:
    """Every sample without max_norm, scale_grad_by_freq or sparse, which the op does not have."""
    ran = 0
    for sample in samples("nn.functional.embedding", dtype):
        if set(sample.kwargs) - {"padding_idx"}:
            with pytest.raises(TypeError, match="unexpected keyword argument"):
                call(EMBEDDING, sample.args[0], sample.input, **sample.kwargs)
            continue
        wanted = torch.nn.functional.embedding(sample.args[0], sample.input, **sample.kwargs)
        assert torch.equal(call(EMBEDDING, sample.args[0], sample.input, **sample.kwargs), wanted)
        ran += 1
    assert ran >= 5


def test_what_torch_refuses_is_refused() -> None:
    """Error inputs: a weight that does not fit rms_norm's axes, an embedding table that is not a matrix."""
    refused: list[tuple[Op, tuple[Any, ...]]] = []
    for error in info("nn.functional.rms_norm").error_inputs("cpu"):
        shape, weight, _ = error.sample_input.args
        if weight is not None:
            refused.append((RMS_NORM, (error.sample_input.input.flatten(-len(shape)), weight)))
    for error in info("nn.functional.embedding").error_inputs("cpu"):
        refused.append((EMBEDDING, (error.sample_input.args[0], error.sample_input.input)))
    assert len(refused) == 3
    for op, operands in refused:
        with pytest.raises(ValueError, match="weight needs"):
            call(op, *operands)
