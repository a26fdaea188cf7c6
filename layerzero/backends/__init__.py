"""The backends: one file or folder each, the only vendor imports, blind to each other."""
