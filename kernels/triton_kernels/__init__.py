"""Triton device code. Only these modules import triton at module level; hosts import them inside functions."""
