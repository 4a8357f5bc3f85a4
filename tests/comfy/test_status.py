"""The live status: the messages to the browser, what they cost, and what a reloaded page is told."""

import asyncio
import importlib
import json
import logging
import re
import sys
import time
from types import SimpleNamespace

import pytest
import torch

from .pack import NODE_ID
from .renders import probed, render, watched
from .test_calls import HEADS, qkv
from .watch import watching

EVENT = "vc_attention.status"


def statuses(host) -> list[dict]:
    return [data for event, data in host.events if event == EVENT]


@pytest.fixture
def unthrottled(pack, monkeypatch):
    """Every evaluation sends; a tiny model makes more of them than may be sent."""
    module = next(m for m in pack.modules() if m.__name__.endswith(".nodes.status"))
    monkeypatch.setattr(module, "LEAST_SECONDS", 0.0)


def test_messages_follow_the_run(host, pack, unthrottled):
    """One an evaluation and one at the end; counters only grow; the last says what the report says."""
    _, watch = watched(host, pack, pack.patch(host.model(), unique_id="42"), steps=4)
    seen = statuses(host)
    assert [s["state"] for s in seen] == ["running"] * 4 + ["done"]
    assert {s["node"] for s in seen} == {"42"}
    assert [s["step"] for s in seen] == [1, 2, 3, 4, 4]
    assert {s["steps"] for s in seen} == {4}
    for counter in ("accelerated", "declined", "groupings", "seconds", "total_seconds"):
        values = [s[counter] for s in seen]
        assert values == sorted(values), counter
    last = seen[-1]
    assert (last["accelerated"], last["declined"]) == (len(watch.accelerated()), len(watch.declined()))
    assert last["modes"] == [["8-bit", "reference"]]
    assert last["blocks"] == [2, 2]
    assert last["groupings"] > 0
    assert 0 < last["share"] <= 1
    assert last["reasons"] == [["cross-attention", 8]]
    assert "\n".join(last["lines"]) == host.texts[-1][0]


def test_time_counts_from_the_first_evaluation(host, pack):
    with watching(host, pack) as watch:
        watch.before = lambda call: time.sleep(0.2) if len(watch.calls) == 1 else None
        render(host, pack.patch(host.model()), steps=3)
    assert statuses(host)[-1]["total_seconds"] >= 0.2


def test_messages_are_plain_and_small(host, pack, unthrottled):
    render(host, pack.patch(host.model()), steps=2)
    for status in statuses(host):
        assert len(json.dumps(status, allow_nan=False)) < 2000


def test_messages_are_throttled(host, pack):
    """A model that is evaluated a hundred times a second sends no hundred messages."""
    started = time.monotonic()
    render(host, pack.patch(host.model(), min_tokens=10**6), steps=30)
    seconds = time.monotonic() - started
    running = [s for s in statuses(host) if s["state"] == "running"]
    assert 1 <= len(running) <= 1 + seconds / 0.3


def test_a_tick_costs_microseconds(host, pack, unthrottled):
    """Under 1 % of a step: a step of a real video model takes seconds, one tick is held below a millisecond."""
    status = next(m for m in pack.modules() if m.__name__.endswith(".nodes.status"))
    run = next(m for m in pack.modules() if m.__name__.endswith(".nodes.run_state"))
    settings = next(m for m in pack.modules() if m.__name__.endswith(".nodes.settings"))
    state = run.RunState("t", settings.Settings(), pack.kernels.Schedule([1.0, 0.5, 0.0]))
    live = status.LiveStatus("7")
    started = time.perf_counter()
    for _ in range(200):
        live.tick(state)
    assert (time.perf_counter() - started) / 200 < 1e-3


def test_nothing_accelerated_is_told(host, pack):
    render(host, pack.patch(host.model(), min_tokens=10**6), steps=2)
    last = statuses(host)[-1]
    assert (last["state"], last["accelerated"], last["modes"]) == ("done", 0, [])
    assert any("min_tokens" in text for text, _ in last["reasons"])
    assert "0 %" in last["lines"][0]


def test_the_cause_comes_before_what_every_render_has(host, pack, unthrottled):
    """Wan I2V: two cross-attentions a block. The row of a running render shows the first reason."""
    args = qkv(keys=40)
    model = probed(host, host.model(), lambda attention, options: attention(*args, HEADS, transformer_options=options))
    render(host, pack.patch(model, implementation="auto"), steps=2)
    for status in statuses(host)[1:]:
        assert status["reasons"][-1][0] == "cross-attention"
        assert status["reasons"][-1][1] > status["reasons"][0][1]
        assert "CPU" in status["reasons"][0][0]


def test_a_fault_is_told_at_once(host, pack, unthrottled):
    """The calls before it were accelerated: counters alone would look well to the end."""
    with watching(host, pack) as watch:
        watch.in_kernel = lambda kernel: {}["broken"] if len(watch.accelerated()) == 3 else None
        render(host, pack.patch(host.model()), steps=4)
    assert [status["fault"] for status in statuses(host)] == [None, None, *["failed: KeyError: 'broken'"] * 3]
    assert statuses(host)[-1]["accelerated"] == 3


def test_off_is_told(host, pack):
    """Nothing runs, so nothing else would take an earlier render's numbers from the row."""
    record = next(m for m in pack.modules() if m.__name__.endswith(".nodes.record"))
    render(host, pack.patch(host.model(), unique_id="33"), steps=1)
    pack.patch(host.model(), unique_id="33", mode="off")
    last = statuses(host)[-1]
    assert (last["node"], last["state"]) == ("33", "off")
    assert [status for status in record.RECORD.statuses() if status["node"] == "33"] == [last]


def test_a_report_that_fails_leaves_no_row_running(host, pack, monkeypatch):
    """After a fault of the GPU nothing can be read back from it."""

    def broken(*args):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    energy = next(m for m in pack.modules() if m.__name__.endswith(".nodes.removed_energy"))
    timing = next(m for m in pack.modules() if m.__name__.endswith(".nodes.timing"))
    monkeypatch.setattr(energy.RemovedEnergy, "by_place", broken)
    monkeypatch.setattr(timing.Stopwatch, "seconds", broken)
    assert torch.isfinite(render(host, pack.patch(host.model()), steps=2)).all()
    last = statuses(host)[-1]
    assert last["state"] == "done"
    assert last["accelerated"] == 4
    assert "log" in last["lines"][0]


def test_time_of_devices_side_by_side_is_their_mean(host, pack):
    """Two GPUs that are busy all the time are not busy for 200 % of it."""
    timing = next(m for m in pack.modules() if m.__name__.endswith(".nodes.timing"))
    stopwatch = timing.Stopwatch()
    for device in (torch.device("cpu", 0), torch.device("cpu", 1), torch.device("cpu", 0)):
        with stopwatch.measure(device, "a block"):
            time.sleep(0.01)
    assert stopwatch.by_place["a block"] >= 0.03
    assert stopwatch.seconds() == pytest.approx(stopwatch.by_place["a block"] / 2)


def test_replaced_attention_is_told(host, pack):
    """No call reaches us: no reasons, but a sentence."""
    model = host.select_attention(pack.patch(host.model()), host.attention.attention_pytorch)
    render(host, model, steps=1)
    last = statuses(host)[-1]
    assert (last["accelerated"], last["declined"], last["reasons"]) == (0, 0, [])
    assert "replaced" in last["lines"][0]


def test_interrupted_run_is_stopped_not_done(host, pack):
    with watching(host, pack) as watch:
        watch.before = lambda call: host.interrupt.set(True) if len(watch.calls) == 6 else None
        with pytest.raises(host.InterruptProcessingException):
            render(host, pack.patch(host.model()), steps=4)
    assert statuses(host)[-1]["state"] == "stopped"


def test_two_nodes_have_their_own_status(host, pack):
    high = pack.patch(host.model(), unique_id="7")
    low = pack.patch(host.model(), unique_id="8", skip_blocks="0")
    half = render(host, high, steps=4, start=0, last=2)
    render(host, low, latent=half, steps=4, start=2, last=4, add_noise=False)
    done = {s["node"]: s for s in statuses(host) if s["state"] == "done"}
    assert set(done) == {"7", "8"}
    assert (done["7"]["accelerated"], done["8"]["accelerated"]) == (4, 2)


def test_prompt_of_a_run_is_named(host, pack):
    with host.in_prompt("a-prompt"):
        render(host, pack.patch(host.model()), steps=1)
    assert statuses(host)[-1]["prompt"] == "a-prompt"
    assert (statuses(host)[-1]["workflow"], statuses(host)[-1]["client"]) == (None, None)


def test_workflow_of_a_run_is_named(host, pack, monkeypatch):
    """From the queue item that is running; node ids repeat from workflow to workflow."""
    other = (0, "another", {}, {"extra_pnginfo": {"workflow": {"id": "wrong"}}}, [])
    item = (1, "a-prompt", {}, {"client_id": "page", "extra_pnginfo": {"workflow": {"id": "w-1"}}}, [])
    queue = SimpleNamespace(get_current_queue_volatile=lambda: ([other, item], []))
    server = sys.modules["server"].PromptServer.instance
    monkeypatch.setattr(server, "prompt_queue", queue, raising=False)
    with host.in_prompt("a-prompt"):
        render(host, pack.patch(host.model()), steps=1)
    assert (statuses(host)[-1]["workflow"], statuses(host)[-1]["client"]) == ("w-1", "page")


def test_each_workflow_keeps_its_own_status(host, pack, monkeypatch):
    """Two tabs, the same node id: a reload brings both rows back."""
    record = next(m for m in pack.modules() if m.__name__.endswith(".nodes.record"))
    status = next(m for m in pack.modules() if m.__name__.endswith(".nodes.status"))
    model = pack.patch(host.model(), unique_id="34")
    for workflow in ("w-a", "w-b", "w-a"):
        monkeypatch.setattr(status, "workflow_id", lambda prompt, workflow=workflow: workflow)
        render(host, model, steps=1)
    assert [s["workflow"] for s in record.RECORD.statuses() if s["node"] == "34"] == ["w-b", "w-a"]


def test_a_broken_connection_does_not_lose_the_render(host, pack, monkeypatch):
    def broken(*args, **kwargs):
        raise ConnectionError("gone")

    server = sys.modules["server"].PromptServer.instance
    monkeypatch.setattr(server, "send_sync", broken)
    with pack.log() as records:
        assert torch.isfinite(render(host, pack.patch(host.model()), steps=2)).all()
    assert len(records) == 1
    assert len(host.texts) == 1


def test_a_broken_status_does_not_lose_the_render(host, pack, monkeypatch):
    status = next(m for m in pack.modules() if m.__name__.endswith(".nodes.status"))
    monkeypatch.setattr(status, "snapshot", lambda *args: {}["broken"])
    assert torch.isfinite(render(host, pack.patch(host.model()), steps=2)).all()


def test_a_node_without_an_id_sends_nothing(host, pack):
    model = host.execute(NODE_ID, pack.inputs(host.model()), unique_id=None)[0]
    render(host, model, steps=1)
    assert statuses(host) == []


def test_last_status_is_kept_bounded_and_plain(host, pack):
    """What a reloaded page asks for: one status a node, no tensors, no growth."""
    record = next(m for m in pack.modules() if m.__name__.endswith(".nodes.record"))
    for node in ("7", "8", "7"):
        render(host, pack.patch(host.model(), unique_id=node), steps=1)
    kept = [s for s in record.RECORD.statuses() if s["node"] in ("7", "8") and s["workflow"] is None]
    assert [s["node"] for s in kept] == ["8", "7"]
    assert {s["state"] for s in kept} == {"done"}
    fresh = record.Record()
    for node in range(1000):
        fresh.keep_status(("w", str(node)), {})
        fresh.keep_run("p", {})
    assert len(fresh.statuses()) == record.MOST_STATUSES
    assert len(fresh.runs("p")) == record.MOST_RUNS


# --- the server's two addresses -----------------------------------------------------------------------------------


class Routes(list):
    """Like aiohttp's table of routes: a list of items with a path, filled by decorators."""

    def _add(self, path):
        def register(handler):
            self.append(SimpleNamespace(path=path, handler=handler))
            return handler

        return register

    get = post = _add


@pytest.fixture
def routes(host, pack, monkeypatch):
    """The module of the addresses on a server of its own."""
    module = next(m for m in pack.modules() if m.__name__.endswith(".nodes.routes"))
    monkeypatch.setattr(sys.modules["server"].PromptServer.instance, "routes", Routes(), raising=False)
    answers = SimpleNamespace(json_response=lambda answer, status=200: (status, answer))
    monkeypatch.setitem(sys.modules, "aiohttp", SimpleNamespace(web=answers))
    module.add_routes()
    return module


def addresses() -> Routes:
    return sys.modules["server"].PromptServer.instance.routes


def test_addresses_are_added_once(routes):
    """aiohttp refuses a second handler for an address, and ComfyUI would not start."""
    routes.add_routes()
    assert [route.path for route in addresses()] == [routes.STATUS, routes.LOG_LEVEL]


def set_log_level(level: str) -> tuple:
    class Request:
        async def json(self):
            return {"level": level}

    return asyncio.run(addresses()[1].handler(Request()))


@pytest.fixture
def levels_restored():
    """Loggers outlive a test."""
    before = {name: logging.getLogger(name).level for name in ("VC Attention", "vc_attention")}
    yield
    for name, level in before.items():
        logging.getLogger(name).setLevel(level)


def test_the_log_level_is_that_of_every_logger_of_the_pack(routes, pack, levels_restored):
    sources = [path.read_text(encoding="utf-8") for path in pack.folder.rglob("*.py")]
    named = {name for text in sources for name in re.findall(r"getLogger\((.*?)\)", text)} - {"name"}
    assert named == {'"VC Attention"', '"vc_attention"'}
    assert set_log_level("debug") == (200, {"level": "debug"})
    assert {logging.getLogger(name.strip('"')).level for name in named} == {logging.DEBUG}
    assert set_log_level("default")[0] == 200
    assert {logging.getLogger(name.strip('"')).level for name in named} == {logging.NOTSET}


def test_warnings_only_silences_the_kernels_tests(routes, pack, monkeypatch, levels_restored):
    """Compiling and testing is said by the kernels, not by the nodes."""
    guard = importlib.import_module(pack.name + ".kernels.guard_triton")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a card")
    monkeypatch.setattr(guard, "_self_test", lambda *args: "it differs")
    for level, said in (("info", ["INFO", "ERROR"]), ("warning", ["ERROR"])):
        set_log_level(level)
        with pack.log() as records:
            assert "it differs" in guard._verdict("triton8", "cuda:0", "bfloat16")
        assert [record.levelname for record in records] == said
