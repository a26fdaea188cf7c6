"""What each rank of `benchmarks/gang_cuda.py` runs, a part of it a process."""
