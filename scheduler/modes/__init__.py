"""Around a batch: torch's modes and streams of its callers, and the way of its results to the host."""
