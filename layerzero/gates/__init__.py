"""Release gates: stages with thresholds in a file, waivers that expire, and paired rounds for performance."""
