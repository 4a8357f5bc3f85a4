"""What a test needs and lacks skips it by name, and fails it where REQUIRE names the thing (tests/conftest.py)."""

import pytest

from .. import conftest


class Item:
    """A collected test with some markers."""

    def __init__(self, *markers):
        self._markers = markers

    def get_closest_marker(self, name):
        return name if name in self._markers else None


@pytest.fixture(autouse=True)
def one_gpu_without_tools(monkeypatch):
    monkeypatch.setitem(conftest.ROOMS, "gpu", ("cuda", lambda: None))
    monkeypatch.setitem(conftest.ROOMS, "triton", ("cuda", lambda: "needs Triton"))
    monkeypatch.setitem(conftest.ROOMS, "sanitizer", ("cuda", lambda: "needs compute-sanitizer"))
    monkeypatch.setitem(conftest.ROOMS, "two_gpus", ("two-gpus", lambda: "needs two CUDA devices"))


@pytest.mark.parametrize("markers", [("gpu", "triton"), ("gpu", "sanitizer"), ("gpu", "two_gpus")])
@pytest.mark.parametrize("required", ["", "comfy", "cuda", "two-gpus", "cuda, two-gpus"])
def test_a_missing_thing_fails_where_it_is_required(markers, required, monkeypatch):
    monkeypatch.setenv("REQUIRE", required)
    thing, missing = conftest.ROOMS[markers[-1]]
    outcome = pytest.fail.Exception if thing in required else pytest.skip.Exception
    with pytest.raises(outcome, match=missing()):
        conftest.pytest_runtest_setup(Item(*markers))


def test_what_is_there_runs(monkeypatch):
    monkeypatch.setenv("REQUIRE", "cuda,two-gpus")
    conftest.pytest_runtest_setup(Item("gpu"))
    conftest.pytest_runtest_setup(Item())


def test_an_unknown_thing_is_refused(monkeypatch):
    monkeypatch.setenv("REQUIRE", "cuda,two_gpus")
    with pytest.raises(pytest.UsageError, match="two_gpus.*two-gpus"):
        conftest.required()


def test_a_sanitizer_off_the_path_is_named(monkeypatch):
    monkeypatch.setattr(conftest.shutil, "which", lambda name: None)
    assert "compute-sanitizer" in conftest.missing_sanitizer()
