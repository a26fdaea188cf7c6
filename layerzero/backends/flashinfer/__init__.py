"""FlashInfer: attention over pages, ragged and dense batches, latent attention, and row kernels.

`library` imports it, `planning` turns lengths into plans and keeps workspaces, `prefix` reads pages that a
batch's sequences share once, `attention`, `mla` and `norm_rope` hold one adapter a kernel. `sampling` has its
filters without its samplers: these, chain speculative sampling among them, draw from a generator of their own
and cannot give a row the token that its seed gives elsewhere. Its quantizers scale for Blackwell's formats;
its norms round to eight bits with one scale for the whole tensor.
"""
