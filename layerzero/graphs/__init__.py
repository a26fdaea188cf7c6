"""CUDA graphs: which kernels may be captured, proved by capturing them, and steps that replay.

`proof` keeps what was found about each kernel in each environment, `observe` finds it on a GPU, `verdict`
says what follows from it; `rehearsal` makes plans for a capture before it begins; `step` is a function
captured for buckets of sizes.
"""
