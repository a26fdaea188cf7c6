"""FlashInfer: attention over pages, ragged and dense batches, latent attention, and row kernels.

`library` imports it, `planning` turns lengths into plans and keeps workspaces, `attention`, `latent` and
`rows` hold one adapter a kernel. Its samplers draw from a generator of their own and cannot give a row the
token that its seed gives elsewhere; the op promises that, so no sampling kernel is offered.
"""
