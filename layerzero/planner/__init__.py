"""Planning several ops at once: kernels, layouts, dtypes and fusions of a block, chosen together."""
