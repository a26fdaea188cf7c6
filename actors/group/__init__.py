"""The rank group of a tensor-parallel model: one decision and one step for all ranks."""
