"""Kernels that are functions of torch, a file each for what they have in common."""
