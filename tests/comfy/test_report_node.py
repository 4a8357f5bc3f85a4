"""VC Attention Report: what it tells of this prompt's runs, how long that is kept, and what it never breaks."""

import gc
import json
import weakref

import pytest
import torch

from .renders import prompts, render, watched

NODE = "VCAttentionReport"


def ask(host, prompt="p-1", latent=None) -> tuple:
    """Run the node in a prompt: latent, picture, and the JSON read."""
    latent = {"samples": torch.zeros(1)} if latent is None else latent
    with host.in_prompt(prompt, "9"):
        passed, picture, text = host.execute(NODE, {"latent": latent}, unique_id="9")
    assert passed is latent
    assert picture.ndim == 4
    assert picture.shape[0] == 1
    assert picture.shape[-1] == 3
    assert picture.dtype == torch.float32
    assert 0 <= picture.min() <= picture.max() <= 1
    return picture, json.loads(text)


def in_prompt(host, prompt, action):
    with host.in_prompt(prompt):
        return action()


def total(run, name) -> int:
    return sum(sum(row[name]) for row in run["rows"])


def test_schema(pack):
    """Names and order are part of saved workflows."""
    schema = pack.nodes[NODE].GET_SCHEMA()
    assert (schema.node_id, schema.display_name) == (NODE, "VC Attention Report")
    assert [item.id for item in schema.inputs] == ["latent"]
    assert [item.id for item in schema.outputs] == ["latent", "picture", "json"]
    assert schema.is_output_node


def test_rows_are_what_the_model_did(host, pack):
    """Against the calls watched from outside: per block and step."""
    model = pack.patch(host.model(), skip_blocks="1", grouping_window=0.5, refresh_interval=1, unique_id="7")
    _, watch = in_prompt(host, "p-rows", lambda: watched(host, pack, model, steps=4))
    _, report = ask(host, "p-rows")
    (run,) = report["runs"]
    assert report["prompt"] == "p-rows"
    assert (run["node"], run["completed"], run["steps"], run["calls"]) == ("7", True, 4, len(watch.calls))
    assert run["modes"] == [["8-bit", "reference"]]
    assert run["lines"] == host.texts[-1][0].split("\n")
    rows = {row["block"]: row for row in run["rows"]}
    assert set(rows) == {0, 1}
    # Two calls a block and step, both prompts in one call: block 0 serves its self-attention, block 1 nothing.
    assert rows[0]["accelerated"] == [1, 1, 1, 1]
    assert rows[0]["declined"] == [1, 1, 1, 1]
    assert rows[1]["accelerated"] == [0, 0, 0, 0]
    assert rows[1]["declined"] == [2, 2, 2, 2]
    assert rows[0]["groupings"] == [2, 2, 0, 0]
    assert rows[1]["groupings"] == [0, 0, 0, 0]
    assert (rows[0]["modes"], rows[1]["modes"]) == ([["8-bit", "reference"]], [])
    assert 0 < rows[0]["error"] < 0.2
    assert rows[1]["error"] is None
    assert all(seconds > 0 for seconds in rows[0]["seconds"])
    assert total(run, "seconds") == pytest.approx(run["seconds"], abs=1e-4)
    assert dict(map(tuple, run["declined"])) == {"cross-attention": 8, "in skip_blocks": 4}
    assert sum(run["left_to"].values()) == 12


def groupings_made(pack, action) -> list[tuple]:
    """Values and grouping of every ``group_values`` call inside ``action``, in order."""
    made, original = [], pack.kernels.group_values

    def spy(v, previous=None, **keywords):
        grouping = original(v, previous, **keywords)
        made.append((v.clone(), grouping, keywords["layout"]))
        return grouping

    with pack.replaced(group_values=spy):
        action()
    return made


def test_removed_energy_is_that_of_the_groupings(host, pack):
    """A number where values were grouped, of the prompt grouped last; what steps without a grouping removed is open."""
    model = pack.patch(host.model(), grouping_window=0.5, refresh_interval=1, skip_blocks="1")
    made = groupings_made(pack, lambda: in_prompt(host, "p-energy", lambda: render(host, model, steps=4)))
    (run,) = ask(host, "p-energy")[1]["runs"]
    rows = {row["block"]: row["removed_energy"] for row in run["rows"]}
    shares = [pack.kernels.sampled_removed_energy(v, grouping, layout=layout) for v, grouping, layout in made]
    assert len(shares) == 4, "two prompts, two steps"
    assert rows[0] == [pytest.approx(shares[1].item(), abs=1e-4), pytest.approx(shares[3].item(), abs=1e-4), None, None]
    assert rows[1] == [None] * 4
    assert all(0 < share < 1 for share in shares)
    assert f"took {(rows[0][0] + rows[0][1]) / 2:.0%} of their energy" in "\n".join(run["lines"])


def test_memory_of_the_held_groupings(host, pack):
    """Permutations and centroids of both prompts, once per block however often they were made anew."""
    model = pack.patch(host.model(), grouping_window=1.0, refresh_interval=1)
    made = groupings_made(pack, lambda: in_prompt(host, "p-held", lambda: render(host, model, steps=3)))
    (run,) = ask(host, "p-held")[1]["runs"]
    last = [grouping for _, grouping, _ in made[-4:]]
    assert len(made) == 12, "two blocks, two prompts, three steps"
    assert run["held_bytes"] == sum(g.permutation.nbytes + g.centroids.nbytes for g in last)
    assert "GB" not in "\n".join(run["lines"]), "not worth a word"


def test_much_held_memory_is_said(host, pack, monkeypatch):
    report = next(m for m in pack.modules() if m.__name__.endswith(".nodes.report"))
    monkeypatch.setattr(report, "WORTH_SAYING_BYTES", 1)
    render(host, pack.patch(host.model()), steps=1)
    assert "GB of memory" in host.texts[-1][0]


def test_energy_of_values_that_are_not_finite_is_left_out(pack):
    module = next(m for m in pack.modules() if m.__name__.endswith(".nodes.removed_energy"))
    energy = module.RemovedEnergy()
    energy.put("a", torch.tensor(float("nan")))
    energy.put("b", torch.tensor(0.25))
    energy.put("b", torch.tensor(0.5))
    assert energy.by_place() == {"b": 0.5}


@pytest.mark.parametrize("kind", ["wan", "joint"])
def test_rows_add_up(host, pack, kind):
    in_prompt(host, f"p-sum-{kind}", lambda: render(host, pack.patch(host.model(kind)), kind, steps=3))
    (run,) = ask(host, f"p-sum-{kind}")[1]["runs"]
    assert total(run, "accelerated") == run["accelerated"]
    assert total(run, "accelerated") + total(run, "declined") == run["calls"]
    assert total(run, "groupings") == run["groupings"]


def test_two_samplers_of_one_prompt(host, pack):
    """Wan2.2: both experts, in the order they ran."""
    high, low = pack.patch(host.model(), unique_id="7"), pack.patch(host.model(), unique_id="8")

    def both():
        half = render(host, high, steps=4, start=0, last=2)
        return render(host, low, latent=half, steps=4, start=2, last=4, add_noise=False)

    in_prompt(host, "p-two", both)
    picture, report = ask(host, "p-two")
    assert [run["node"] for run in report["runs"]] == ["7", "8"]
    in_prompt(host, "p-one", lambda: render(host, high, steps=4))
    assert picture.shape[1] > ask(host, "p-one")[0].shape[1], "both runs are in the picture"


def test_only_this_prompt(host, pack):
    """The sampler came from the cache, or another prompt rendered since: nothing is told, and why is."""
    in_prompt(host, "p-old", lambda: render(host, pack.patch(host.model()), steps=1))
    _, cached = ask(host, "p-new")
    assert cached["runs"] == []
    assert "cache" in cached["note"]
    in_prompt(host, "p-new", lambda: render(host, pack.patch(host.model()), steps=1))
    assert ask(host, "p-old")[1]["runs"] == []
    assert len(ask(host, "p-new")[1]["runs"]) == 1


def test_asked_twice(host, pack):
    """Two report nodes in one prompt."""
    in_prompt(host, "p-twice", lambda: render(host, pack.patch(host.model()), steps=1))
    assert ask(host, "p-twice")[1] == ask(host, "p-twice")[1]


def test_nothing_accelerated(host, pack):
    in_prompt(host, "p-idle", lambda: render(host, pack.patch(host.model(), min_tokens=10**6), steps=2))
    (run,) = ask(host, "p-idle")[1]["runs"]
    assert (run["accelerated"], run["modes"]) == (0, [])
    assert "0 %" in run["lines"][0]


def test_stopped_run(host, pack):
    def stopped():
        host.interrupt.set(True)
        render(host, pack.patch(host.model()), steps=4)

    with pytest.raises(host.InterruptProcessingException):
        in_prompt(host, "p-stop", stopped)
    (run,) = ask(host, "p-stop")[1]["runs"]
    assert run["completed"] is False


def test_many_steps_and_runs_stay_drawable(host, pack):
    """Bounded: at most so many runs are kept, and a long schedule still fits the picture's width."""
    model = pack.patch(host.model(), min_tokens=10**6)
    in_prompt(host, "p-long", lambda: render(host, model, steps=200))
    picture, report = ask(host, "p-long")
    assert report["runs"][0]["steps"] == 200
    record = next(m for m in pack.modules() if m.__name__.endswith(".nodes.record"))
    in_prompt(host, "p-many", lambda: [render(host, model, steps=1) for _ in range(record.MOST_RUNS + 2)])
    assert len(ask(host, "p-many")[1]["runs"]) == record.MOST_RUNS
    assert ask(host, "p-many")[0].shape[2] == picture.shape[2]


def test_no_tensor_is_kept(host, pack):
    """After a prompt the record holds plain values: the render's tensors and run state are gone."""
    record = next(m for m in pack.modules() if m.__name__.endswith(".nodes.record"))
    run_state = next(m for m in pack.modules() if m.__name__.endswith(".nodes.run_state"))

    def alive() -> int:
        gc.collect()
        return sum(type(o) is run_state.RunState for o in gc.get_objects())

    before = alive()  # tracebacks that pytest keeps of other tests may hold some
    output = in_prompt(host, "p-gone", lambda: render(host, pack.patch(host.model()), steps=2))
    kept, gone = json.dumps(record.RECORD.runs("p-gone")), weakref.ref(output)
    del output
    assert alive() == before
    assert gone() is None
    assert len(kept) < 20_000


def test_a_picture_that_cannot_be_written_does_not_lose_the_render(host, pack, monkeypatch):
    def full(*args, **kwargs):
        raise OSError("no space left on device")

    node = next(m for m in pack.modules() if m.__name__.endswith(".nodes.pictures"))
    monkeypatch.setattr(node.ui, "PreviewImage", full)
    in_prompt(host, "p-full", lambda: render(host, pack.patch(host.model()), steps=1))
    with pack.log() as records:
        _, report = ask(host, "p-full")
    assert len(report["runs"]) == 1
    assert [r.levelname for r in records] == ["WARNING"]


def test_a_broken_record_does_not_lose_the_render(host, pack, monkeypatch):
    sampling = next(m for m in pack.modules() if m.__name__.endswith(".nodes.sampling"))

    def broken(*args):
        raise ZeroDivisionError

    monkeypatch.setattr(sampling, "entry_of", broken)
    with pack.log() as records:
        assert torch.isfinite(render(host, pack.patch(host.model()), steps=1, conds=prompts(host))).all()
    assert "could not report" in records[-1].getMessage()
    assert len(host.texts) == 1
