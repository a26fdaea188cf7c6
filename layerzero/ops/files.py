"""The file that defines each op, without importing any of them."""

from types import MappingProxyType

# A call imports its own op's file and no other, since the first call waits for it.
FILES = MappingProxyType(
    {
        "add_layer_norm": "norm",
        "add_rms_norm": "norm",
        "add_rms_norm_quantize": "norm_quantize",
        "alibi": "alibi",
        "append_kv": "append",
        "attention": "attention",
        "cross_entropy": "cross_entropy",
        "dequantize": "quantize",
        "embedding": "embedding",
        "layer_norm": "norm",
        "linear": "linear",
        "linear_cross_entropy": "linear_cross_entropy",
        "mla_attention": "mla",
        "mlp": "mlp",
        "moe": "moe",
        "paged_attention": "paged",
        "quantize": "quantize",
        "quantized_linear": "quantized_linear",
        "ragged_attention": "ragged",
        "rms_norm": "norm",
        "rope": "rope",
        "sample": "sampling",
        "sample_topk": "sampling",
        "sample_topp": "sampling",
        "verify_chain": "verify",
        "verify_tree": "verify",
    }
)
