"""What a kernel is expected to cost."""
