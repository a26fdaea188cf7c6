"""Attention over block tables, ragged rows and latent caches, and the write into a cache."""
