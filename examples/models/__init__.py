"""The models that the examples run."""
