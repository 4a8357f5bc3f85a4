"""How many tokens take part in the centroid updates; the same for every implementation."""

SAMPLED_FROM = 4096  # tokens from which the updates look at a sample
SAMPLE_STEP = 4  # removes 0.1 to 0.5 points less block energy than all tokens, for half the time (H200, 75,600)


def sample_step(tokens: int) -> int:
    """Every how many tokens one takes part in the centroid updates."""
    return SAMPLE_STEP if tokens >= SAMPLED_FROM else 1
