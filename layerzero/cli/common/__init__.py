"""What every command shares: its options, its way to name a call, its output."""
