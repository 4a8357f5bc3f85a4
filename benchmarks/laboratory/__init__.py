"""The fidelity laboratory: what a number format, an order of tokens or a grouping schedule does to a render."""
