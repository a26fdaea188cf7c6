"""Products with weights, and what is fused with them."""
