"""A Llama over several ranks: heads and columns, or layers."""
