"""Deciding ranges of sizes ahead: a decision tree over what kernels cost at samples of them."""
