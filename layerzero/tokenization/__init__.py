"""Tokenizers with an identity: what a text becomes depends on a digest of everything that decides it."""

from layerzero.tokenization.tokenizer import Identity as Identity
from layerzero.tokenization.tokenizer import Tokenizer as Tokenizer
from layerzero.tokenization.tokenizer import Tokens as Tokens
