"""From q, k, v to the low-bit operands of an attention kernel."""
