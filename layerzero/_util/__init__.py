"""Small parts that know nothing of kernels: clocks, files, logs, imports."""
