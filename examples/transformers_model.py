"""A model of transformers on LayerZero's ops: its table, the same tokens, a training step, and back.

Run `python examples/transformers_model.py`. The model is small and random, so that nothing is downloaded;
`AutoModelForCausalLM.from_pretrained(...)` takes its place.
"""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

import layerzero as lz


def model() -> PreTrainedModel:
    """A Llama of two layers with random weights."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=97, num_key_value_heads=2, **sizes)).eval()


def main() -> None:
    """Generate before, while and after the model is patched; train one step in between."""
    llama = model()
    prompt = torch.randint(3, 97, (2, 8), generator=torch.Generator().manual_seed(1))
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    before = llama.generate(prompt, **options)

    lz.patch(llama)
    print(lz.patch_table(llama))
    patched = llama.generate(prompt, **options)
    print(f"same tokens: {torch.equal(before, patched)}")

    llama.train()
    loss = llama(input_ids=prompt, labels=prompt).loss
    loss.backward()
    print(f"loss {loss:.3f}, without the logits of all tokens at once")

    lz.unpatch(llama.eval())
    print(f"same tokens after unpatch: {torch.equal(before, llama.generate(prompt, **options))}")


if __name__ == "__main__":
    main()
