"""Parts of `benchmarks/fleet_cuda.py`: what runs in Ray actors, in this process and in ranks beside them."""
