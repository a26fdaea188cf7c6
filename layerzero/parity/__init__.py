"""The parity ladder: ops, a layer, its stages, the whole model, each against something written apart.

    python -m layerzero.parity --level 1     # every op, forward and backward, against float64
    python -m layerzero.parity --level 2     # one whole layer, every buffer and gradient; prefill + decode
    python -m layerzero.parity --level 3     # the stages of every layer, on real weights
    python -m layerzero.parity --level 4     # logits and tokens against transformers

`--plant NAME` puts a known bug into our side; the report must name its place. A level that fails while the
one below passes points at how the parts were put together, not at a part.
"""
