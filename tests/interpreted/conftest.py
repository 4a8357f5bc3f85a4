"""The Triton kernels in Triton's interpreter, on the CPU: ``TRITON_INTERPRET=1 pytest tests/interpreted``.

The variable is read when a kernel is defined and holds for the whole process, so these tests have one of their own;
tests/torch_cpu/test_triton_interpreted.py starts it.
"""

import importlib.util
import os
from pathlib import Path

import pytest

ROOM = Path(__file__).parent


def _why_not() -> str | None:
    if os.environ.get("TRITON_INTERPRET") != "1":
        return "needs TRITON_INTERPRET=1; tests/torch_cpu/test_triton_interpreted.py runs these"
    if importlib.util.find_spec("triton") is None:
        return "needs Triton, which is not installed"
    return None


def pytest_collection_modifyitems(items):
    reason = _why_not()
    if reason is not None:
        for item in items:
            if item.path.parent == ROOM:
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session", autouse=True)
def loops_over_tensors():
    """NumPy 2.4 no longer turns an array of one element into an index, as Triton 3.6's interpreter expects."""
    if _why_not() is not None:
        yield
        return
    from triton.runtime import interpreter

    patched = interpreter._patch_lang_tensor

    def with_index(tensor, scope):
        patched(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = with_index
    yield
    interpreter._patch_lang_tensor = patched
