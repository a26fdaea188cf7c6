"""What runs when, without a loop, a clock or a thread."""
