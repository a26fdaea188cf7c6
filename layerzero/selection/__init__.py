"""Judging all kernels, pricing the accepted ones, deciding, and keeping the whole trace."""
