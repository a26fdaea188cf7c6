"""Quantized values, and products of them."""
