"""Measuring kernels: calls as values, their timing, the gate of correctness before it, and what came out."""
