"""A pipeline of diffusers on LayerZero's ops: the image of a seed, before and after, by patch and by name.

Run `python examples/diffusers_pipeline.py`. The models are small and random, so that nothing is downloaded;
`DiffusionPipeline.from_pretrained(...)` takes their place.
"""

from __future__ import annotations

import torch
from diffusers import AutoencoderKL, DDIMScheduler, DiTPipeline, DiTTransformer2DModel

import layerzero as lz


def pipeline() -> DiTPipeline:
    """A diffusion transformer of two layers and a small autoencoder, with random weights."""
    torch.manual_seed(0)
    transformer = DiTTransformer2DModel(
        num_attention_heads=2, attention_head_dim=8, in_channels=4, num_layers=2, sample_size=8, patch_size=2,
        num_embeds_ada_norm=1000, out_channels=8,
    )  # fmt: skip
    autoencoder = AutoencoderKL(block_out_channels=(8,), latent_channels=4, norm_num_groups=4, sample_size=8)
    pipe = DiTPipeline(transformer=transformer.eval(), vae=autoencoder.eval(), scheduler=DDIMScheduler())
    pipe.set_progress_bar_config(disable=True)
    return pipe


def image(pipe: DiTPipeline) -> torch.Tensor:
    """The image of a seed, (1, height, width, 3)."""
    seed = torch.Generator().manual_seed(5)
    made = pipe([1], generator=seed, num_inference_steps=4, output_type="np")
    return torch.from_numpy(made.images)


def main() -> None:
    """Draw the same image before, while and after the pipeline is patched."""
    pipe = pipeline()
    before = image(pipe)
    lz.patch(pipe)
    print(lz.patch_table(pipe))
    print(f"largest difference of a pixel: {(image(pipe) - before).abs().max():.1e}")
    lz.unpatch(pipe)
    print(f"same bits after unpatch: {torch.equal(image(pipe), before)}")


if __name__ == "__main__":
    main()
