"""Tokens drawn from logits, and drafts verified."""
