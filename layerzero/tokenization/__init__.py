"""Texts to ids and back: the tokenizers of four libraries, and the awaited functions over them."""
