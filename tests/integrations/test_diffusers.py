"""Models and pipelines of diffusers on our ops: same images, by name and by patch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import layerzero as lz
from tests.integrations.models import counting

diffusers: Any = pytest.importorskip("diffusers", reason="the pipelines' library is missing: .[test]")

from layerzero.integrations import diffusers as integration  # noqa: E402  (where it is installed)


@pytest.fixture(autouse=True)
def runtime() -> Iterator[lz.Runtime]:
    """A runtime whose counters start at zero."""
    with lz.start(lz.Settings.load(warm="off", device="cpu")) as opened:
        yield opened


def numbers(*shape: int) -> Tensor:
    """The same random numbers every time."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(3))


IMAGE, STEP = numbers(2, 4, 8, 8), torch.tensor([5, 7])


def dit() -> tuple[Any, Callable[[Any], Tensor]]:
    """Self-attention over patches of an image, modulated norms."""
    model = diffusers.DiTTransformer2DModel(
        num_attention_heads=2, attention_head_dim=8, in_channels=4, num_layers=2, sample_size=8, patch_size=2,
        num_embeds_ada_norm=10,
    )  # fmt: skip
    return model, lambda m: m(IMAGE, timestep=STEP, class_labels=torch.tensor([1, 2])).sample


def unet() -> tuple[Any, Callable[[Any], Tensor]]:
    """Convolutions with self- and cross-attention, by processors that call torch's function."""
    model = diffusers.UNet2DConditionModel(
        sample_size=8, in_channels=4, out_channels=4, layers_per_block=1, block_out_channels=(16, 32),
        norm_num_groups=8, down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"), cross_attention_dim=16, attention_head_dim=8,
    )  # fmt: skip
    seen = torch.tensor([[1, 1, 1, 1, 0], [1, 1, 0, 0, 0]])
    return model, lambda m: m(IMAGE, STEP, numbers(2, 5, 16), encoder_attention_mask=seen).sample


def sd3() -> tuple[Any, Callable[[Any], Tensor]]:
    """Joint attention of text and image."""
    model = diffusers.SD3Transformer2DModel(
        sample_size=8, patch_size=2, in_channels=4, num_layers=2, attention_head_dim=8, num_attention_heads=2,
        joint_attention_dim=16, caption_projection_dim=16, pooled_projection_dim=16, out_channels=4,
    )  # fmt: skip
    return model, lambda m: m(
        hidden_states=IMAGE, encoder_hidden_states=numbers(2, 5, 16), pooled_projections=numbers(2, 16),
        timestep=STEP,
    ).sample  # fmt: skip


def flux() -> tuple[Any, Callable[[Any], Tensor]]:
    """Joint and single blocks, normed queries and keys, rotary axes."""
    model = diffusers.FluxTransformer2DModel(
        patch_size=1, in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16,
        num_attention_heads=2, joint_attention_dim=32, pooled_projection_dim=32, axes_dims_rope=[4, 4, 8],
    )  # fmt: skip
    rows = IMAGE.flatten(2).transpose(1, 2)
    return model, lambda m: m(
        hidden_states=rows, encoder_hidden_states=numbers(2, 5, 32), pooled_projections=numbers(2, 32),
        timestep=STEP / 10, img_ids=numbers(64, 3), txt_ids=torch.zeros(5, 3),
    ).sample  # fmt: skip


def wan() -> tuple[Any, Callable[[Any], Tensor]]:
    """A video: self-attention over frames, cross-attention to text."""
    model = diffusers.WanTransformer3DModel(
        patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=4,
        text_dim=16, freq_dim=32, ffn_dim=32, num_layers=2, cross_attn_norm=True,
        qk_norm="rms_norm_across_heads", rope_max_seq_len=32,
    )  # fmt: skip
    return (
        model,
        lambda m: (
            m(
                hidden_states=numbers(1, 4, 2, 8, 8),
                timestep=STEP[:1],
                encoder_hidden_states=numbers(1, 5, 16),
            ).sample
        ),
    )


KINDS = [dit, unet, sd3, flux, wan]
# Of the largest number: what other roundings of the same numbers come to.
NEAR = {torch.float32: 5e-6, torch.bfloat16: 5e-2, torch.float16: 8e-3}


def build(kind: Any) -> tuple[Any, Callable[[Any], Tensor]]:
    """A small random model and what runs it."""
    torch.manual_seed(0)
    model, run = kind()
    return model.eval(), run


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_a_patched_model_gives_the_same_image(runtime: lz.Runtime, kind: Any) -> None:
    """Attention and norms through the ops, in a copy too; unpatched, the same bits again."""
    model, run = build(kind)
    before = run(model)
    lz.patch(model)
    with counting() as calls:
        during = run(model)
    torch.testing.assert_close(during, before, atol=NEAR[torch.float32] * float(before.abs().max()), rtol=0)
    assert calls["attention"] == {"dit": 2, "unet": 8, "sd3": 2, "flux": 2, "wan": 4}[kind.__name__]
    assert torch.equal(run(copy.deepcopy(model)), during)
    assert torch.equal(run(lz.unpatch(model)), before)
    with counting() as calls:
        run(lz.unpatch(copy.deepcopy(lz.patch(model))))
    assert calls == {} and runtime.device().health.statuses() == ()


@pytest.mark.parametrize("kind", [dit, sd3, flux, wan])
@torch.no_grad()
def test_a_backend_by_name(kind: Any) -> None:
    """`set_attention_backend("layerzero")` alone has the model's attention through the op."""
    model, run = build(kind)
    before = run(model)
    registry = diffusers.models.attention_dispatch._AttentionBackendRegistry
    default = registry._active_backend
    try:
        model.set_attention_backend("layerzero")
        with counting() as calls:
            during = run(model)
    finally:
        registry.set_active_backend(default)
        model.reset_attention_backend()
    torch.testing.assert_close(during, before, atol=NEAR[torch.float32] * float(before.abs().max()), rtol=0)
    if kind not in (dit, sd3):  # processors of those call torch's function: `lz.patch` serves them
        assert calls["attention"] >= 2 and calls.keys() == {"attention"}
    with counting() as calls:
        assert torch.equal(run(model), before)
    assert calls == {}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@torch.no_grad()
def test_half_precision(dtype: torch.dtype) -> None:
    """A joint transformer in two bytes."""
    model, _ = build(sd3)
    model.to(dtype)

    def run() -> Tensor:
        arguments = {"hidden_states": IMAGE, "encoder_hidden_states": numbers(2, 5, 16)}
        halves = {name: value.to(dtype) for name, value in arguments.items()}
        drawn: Tensor = model(**halves, pooled_projections=numbers(2, 16).to(dtype), timestep=STEP).sample
        return drawn

    before = run()
    lz.patch(model)
    torch.testing.assert_close(run(), before, atol=NEAR[dtype] * float(before.abs().max()), rtol=0)


def test_gradients_flow() -> None:
    """Training a patched transformer gives the same gradients."""
    grads = []
    for patched in (False, True):
        model, run = build(sd3)
        run(lz.patch(model) if patched else model).square().mean().backward()
        grads.append([p.grad for p in model.parameters() if p.grad is not None])
    for ours, theirs in zip(grads[1], grads[0], strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-3)


@pytest.mark.parametrize(
    ("kind", "patched"),
    [
        (flux, False),
        (dit, True),
        *(pytest.param(k, True, marks=pytest.mark.slow) for k in (unet, sd3, flux, wan)),
        pytest.param(wan, False, marks=pytest.mark.slow),
    ],
)
@torch.no_grad()
def test_compiled_it_is_one_graph_that_gives_the_same_image(kind: Any, patched: bool) -> None:
    """Attention is our operator in it, by name and by `patch`."""
    model, run = build(kind)
    before = run(model)
    if patched:
        lz.patch(model)
    registry = diffusers.models.attention_dispatch._AttentionBackendRegistry
    default = registry._active_backend
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("eager")
    try:
        if not patched:
            model.set_attention_backend("layerzero")
        during = run(torch.compile(model, fullgraph=True, backend=counter))
    finally:
        registry.set_active_backend(default)
        torch._dynamo.reset()
    torch.testing.assert_close(during, before, atol=NEAR[torch.float32] * float(before.abs().max()), rtol=0)
    assert counter.frame_count == 1
    targets = {str(node.target) for graph in counter.graphs for node in graph.graph.nodes}
    ours = {name for name in targets if name.startswith("layerzero.")}
    assert "layerzero.attention.default" in ours


@torch.no_grad()
def test_a_pipeline_gives_the_same_image() -> None:
    """Every model of it is patched, the image of a seed is the same, and the table names them."""
    torch.manual_seed(0)
    transformer = diffusers.DiTTransformer2DModel(
        num_attention_heads=2, attention_head_dim=8, in_channels=4, num_layers=2, sample_size=8, patch_size=2,
        num_embeds_ada_norm=1000, out_channels=8,
    )  # fmt: skip
    vae = diffusers.AutoencoderKL(
        block_out_channels=(8, 8), in_channels=3, out_channels=3, latent_channels=4, norm_num_groups=4,
        down_block_types=("DownEncoderBlock2D", "DownEncoderBlock2D"),
        up_block_types=("UpDecoderBlock2D", "UpDecoderBlock2D"), sample_size=16,
    )  # fmt: skip
    pipe = diffusers.DiTPipeline(
        transformer=transformer.eval(), vae=vae.eval(), scheduler=diffusers.DDIMScheduler()
    )
    pipe.set_progress_bar_config(disable=True)

    def image() -> Tensor:
        made = pipe(
            [1, 2], generator=torch.Generator().manual_seed(5), num_inference_steps=3, output_type="np"
        )
        return torch.from_numpy(made.images)

    before = image()
    assert lz.patch(pipe) is pipe
    with counting() as calls:
        torch.testing.assert_close(image(), before, atol=1e-5, rtol=0)
    # Two blocks and, of each half of the autoencoder that runs, one: three steps and one decoding.
    assert calls["attention"] == 2 * 3 + 1
    table = lz.patch_table(pipe)
    assert "DiTTransformer2DModel" in table.model and "AutoencoderKL" in table.model
    lz.unpatch(pipe)
    assert torch.equal(image(), before)
    with pytest.raises(ValueError, match="patched first, this DiTPipeline is not"):
        lz.unpatch(pipe)


def operands(queries: int = 4, keys: int = 4) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values as diffusers lays them out."""
    return numbers(2, queries, 3, 8), numbers(2, keys, 3, 8), numbers(2, keys, 3, 8) + 1


@pytest.mark.parametrize("mask", ["none", "keys", "keys added", "whole", "causal", "causal over more keys"])
def test_masks_are_those_of_the_native_backend(mask: str) -> None:
    """Each form of mask, and causality counted from the first query."""
    dispatch: Any = diffusers.models.attention_dispatch
    q, k, v = operands(4, 6 if mask == "causal over more keys" else 4)
    seen = torch.tensor([[1, 1, 1, 0], [1, 0, 1, 1]]).bool()
    masks = {
        "keys": seen,
        "keys added": torch.zeros(2, 4).masked_fill(~seen, -1e4),
        "whole": seen[:, None, None].expand(2, 3, 4, 4),
    }
    options = {"attn_mask": masks.get(mask), "is_causal": mask.startswith("causal"), "scale": 0.3}
    ours = dispatch.dispatch_attention_fn(q, k, v, **options, backend="layerzero")
    theirs = dispatch.dispatch_attention_fn(q, k, v, **options, backend="native")
    torch.testing.assert_close(ours, theirs)


def test_what_the_backend_has_not_is_named() -> None:
    """Context parallelism, logarithms and unknown arguments: none is dropped."""
    dispatch: Any = diffusers.models.attention_dispatch
    q, k, v = operands()
    with pytest.raises(ValueError, match="context parallelism needs a backend such as"):
        dispatch.dispatch_attention_fn(q, k, v, backend="layerzero", parallel_config=SimpleNamespace())
    for name in ("return_lse", "novelty"):
        with pytest.raises(ValueError, match=f"attention_kwargs: the backend 'layerzero' has no {name}"):
            dispatch.dispatch_attention_fn(q, k, v, backend="layerzero", attention_kwargs={name: True})
    model, _ = build(sd3)
    model.transformer_blocks[0].attn.processor._parallel_config = SimpleNamespace()
    with pytest.raises(ValueError, match="model needs no context parallelism, Attention has it enabled"):
        lz.patch(model)
    with pytest.raises(ValueError, match="this SD3Transformer2DModel is not"):
        lz.unpatch(model)
    with pytest.raises(ValueError, match="does not support context parallelism"):
        model.set_attention_backend("layerzero")


def test_the_name_is_added_once() -> None:
    """A second registration finds the first; copies of the member are the member."""
    member = integration.register()
    assert integration.register() is member is copy.deepcopy(member) and member.value == "layerzero"
    members: Any = type(member)
    names = [x.value for x in members]
    assert names.count("layerzero") == 1
