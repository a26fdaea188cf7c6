"""The ops: one file an operation family, each with schema, reference, shape rule and batching rule."""
