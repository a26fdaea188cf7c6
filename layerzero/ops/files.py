"""The file that defines each op, without importing any of them."""

from types import MappingProxyType

# A call imports its own op's file and no other, since the first call waits for it.
FILES = MappingProxyType(
    {
        "add_layer_norm": "norm.layer_norm",
        "add_rms_norm": "norm.rms_norm",
        "add_rms_norm_quantize": "quantize.norm_quantize",
        "alibi": "attention.alibi",
        "append_kv": "paged.append",
        "attention": "attention.attention",
        "cross_entropy": "linear.cross_entropy",
        "dequantize": "quantize.quantize",
        "embedding": "linear.embedding",
        "fused_experts": "linear.experts",
        "layer_norm": "norm.layer_norm",
        "linear": "linear.linear",
        "linear_cross_entropy": "linear.linear_cross_entropy",
        "mla_attention": "paged.mla",
        "mlp": "linear.mlp",
        "moe": "linear.moe",
        "paged_attention": "paged.attention",
        "quantize": "quantize.quantize",
        "quantized_linear": "quantize.quantized_linear",
        "ragged_attention": "paged.ragged",
        "rms_norm": "norm.rms_norm",
        "rms_norm_linear": "linear.norm_linear",
        "rope": "rope.rope",
        "rope_append_kv": "paged.rope_append",
        "sample": "sampling.sampling",
        "sample_topk": "sampling.sampling",
        "sample_topp": "sampling.sampling",
        "select_experts": "linear.select_experts",
        "verify_chain": "sampling.verify",
        "verify_tree": "sampling.verify",
    }
)
