"""One device of this process: kernels, health, plans, its thread."""
