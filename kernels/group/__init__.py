"""V-Smooth: grouping of value tokens and the block means."""
