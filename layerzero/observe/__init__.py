"""What an operator sees: counters and spans."""
