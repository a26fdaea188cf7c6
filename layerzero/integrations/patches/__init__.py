"""Parts of other people's models on our ops: norms, rotary embeddings, feed-forward blocks, causal losses."""
