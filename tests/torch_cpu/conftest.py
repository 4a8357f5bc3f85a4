"""One thread: these tensors are small, and two threads on a busy machine took four times as long (measured)."""

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture
def two_threads():
    """Run a test with two threads, where the split of the work could show in the result."""
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)
