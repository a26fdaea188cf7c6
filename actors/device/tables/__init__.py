"""The dispatch table of one device: what follows from it, what renews it, what it misses."""
