"""Texts to ids and back: a tokenizer with an identity, and the awaited functions over it."""
