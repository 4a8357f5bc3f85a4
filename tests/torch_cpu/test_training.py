"""The demo model's training at a size that takes seconds: clips, latents, the model against diffusers, and a run."""

import importlib
import json
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="needs torch")
pytest.importorskip("safetensors", reason="needs safetensors")

ROOT = Path(__file__).parents[2]
FOLDERS = (ROOT / "training", ROOT / "nodes", ROOT / "demo")
MODULES = (
    *("backgrounds", "checkpoint", "clips", "curve", "demo_files", "demo_latents", "lettering", "objects", "pack"),
    *("painting", "photographs", "prompts", "sampling", "scenes", "tours", "train", "wan", "wan_checkpoint"),
)
SHIPPED_FIRST = [
    "red balls bounce over blue stripes",
    "yellow boxes tumble over a checkerboard",
    "a green star spins over purple waves",
    "snow falls through the night",
    "planets circle a sun among the stars",
    "balloons rise into a cloudy sky",
    "fish swim through green water",
    "a pinwheel turns before orange stripes",
    "the sun rises over green hills",
    "rings grow on a pond",
    "butterflies of paper cross a meadow, the camera pans right",
    "a beach ball rolls over a grey checkerboard, the camera zooms in",
]
needs_diffusers = pytest.mark.skipif(
    importlib.util.find_spec("diffusers") is None, reason="needs diffusers, which is not installed"
)


@pytest.fixture(scope="module")
def picture(tmp_path_factory):
    """A file that stands for every photograph: their packages need not be installed here."""
    from PIL import Image

    path = tmp_path_factory.mktemp("photographs") / "one.png"
    Image.radial_gradient("L").resize((192, 128)).convert("RGB").save(path)
    return path


@pytest.fixture(scope="module")
def training(picture):
    """Imports a module of training/ or one that it shares with the demo; leaves no trace in this process."""
    kept = list(sys.path)
    sys.path[:0] = map(str, FOLDERS)
    try:
        importlib.import_module("photographs").find = lambda photograph: picture
        yield importlib.import_module
    finally:
        sys.path[:] = kept
        for name in MODULES:
            sys.modules.pop(name, None)


def drawn(training, seed=0, frames=3, side=32):
    """A clip of every prompt."""
    kinds = torch.arange(len(training("prompts").PROMPTS))
    return training("clips").Clips("cpu").draw(kinds, torch.Generator().manual_seed(seed), frames, side, side)


def rough(training, seed=0, layers=2):
    """A small model with no weight at its start value, so that every one of them is seen in the output."""
    wan = training("wan")
    model = wan.WanModel(wan.WanSizes(layers=layers))
    wan.initialize(model, seed)
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.03 * torch.randn(parameter.shape, generator=random))
    return model.eval()


def inputs(seed=1):
    random = torch.Generator().manual_seed(seed)
    shapes = ((2, 16, 3, 8, 10), (2, 8, 64))
    latents, text = (torch.randn(shape, generator=random) for shape in shapes)
    return latents, torch.tensor([300.0, 900.0]), text


# Clips


def test_clips_follow_their_seed(training):
    first = drawn(training)
    assert torch.equal(first, drawn(training))
    assert first.shape == (15, 3, 3, 32, 32)
    assert 0 <= first.min() < first.max() <= 1
    other = drawn(training, seed=1)
    assert all((a - b).abs().mean() > 0.005 for a, b in zip(first, other, strict=True))


def test_every_clip_moves(training):
    frames = drawn(training, frames=9, side=64)
    moved = (frames[:, 8] - frames[:, 0]).abs().mean((1, 2, 3))
    assert moved.min() > 0.005, dict(zip([p.text for p in training("prompts").PROMPTS], moved.tolist(), strict=True))


def test_a_clip_is_the_same_alone_and_among_others(training):
    """A scene's numbers are drawn together; what is rendered from them must not mix."""
    scenes = training("scenes")
    numbers = scenes.draw_scenes(torch.tensor([0, 4, 9]), torch.Generator().manual_seed(3), "cpu")
    whole = scenes.render(numbers, 2, 32, 40)
    for row in range(3):
        pick = slice(row, row + 1)
        alone = scenes.Scenes(
            {name: value[pick] for name, value in numbers.clip.items()},
            {name: value[pick] for name, value in numbers.thing.items()},
            numbers.phases[pick],
        )
        assert torch.allclose(scenes.render(alone, 2, 32, 40), whole[pick], atol=1e-6)


def test_words_and_photographs_are_drawn_twice_as_often_as_each_scene(training):
    weights = torch.tensor([prompt.weight for prompt in training("prompts").PROMPTS])
    assert weights.tolist() == [1.0] * 12 + [2.0] * 3
    assert torch.equal(training("train").Data(torch.device("cpu"), 96, 0).weights, weights)


def test_prompts_keep_their_places(training):
    """The embeddings are stored by place: a new prompt goes last."""
    texts = [prompt.text for prompt in training("prompts").PROMPTS]
    assert texts[:12] == SHIPPED_FIRST
    assert len(set(texts)) == len(texts)


# Latents


def test_latents_give_their_frames_back(training):
    latents = training("demo_latents")
    frames = drawn(training, side=64)
    there = latents.encode(frames)
    assert there.shape == (15, 16, 3, 16, 16)
    error = (latents.decode(there) - frames).square().mean()
    assert -10 * torch.log10(error) > 26  # what the dropped coefficients hold
    assert 0.2 < there.std() < 2


def test_decoded_frames_encode_to_the_same_latents(training):
    latents = training("demo_latents")
    small = 0.05 * torch.randn(2, 16, 3, 4, 5, generator=torch.Generator().manual_seed(0))  # far from black and white
    assert torch.allclose(latents.encode(latents.decode(small)), small, atol=1e-5)


def test_frames_that_cells_do_not_fill_are_refused(training):
    with pytest.raises(ValueError, match="divisible by 4, got 30 x 32"):
        training("demo_latents").encode(torch.zeros(1, 1, 3, 30, 32))


# Model


@needs_diffusers
def test_the_model_is_diffusers_transformer(training):
    from diffusers import WanTransformer3DModel

    model = rough(training)
    other = WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=2,
        attention_head_dim=128,
        in_channels=16,
        out_channels=16,
        text_dim=64,
        freq_dim=256,
        ffn_dim=1024,
        num_layers=2,
        cross_attn_norm=True,
        qk_norm="rms_norm_across_heads",
    ).eval()
    weights = model.state_dict()
    other.load_state_dict({name: weights[training("wan_checkpoint").wan_name(name)] for name in other.state_dict()})
    assert len(weights) == len(other.state_dict())
    with torch.no_grad():
        ours, theirs = model(*inputs()), other(*inputs(), return_dict=False)[0]
    assert theirs.std() > 0.1
    assert torch.allclose(ours, theirs, atol=1e-5)


def test_another_self_attention_is_called_for_every_layer(training):
    model, seen = rough(training), []
    attention = training("wan").torch_attention

    def attend(layer, query, key, value):
        seen.append((layer, tuple(query.shape), tuple(key.shape), tuple(value.shape)))
        return attention(query, key, value)

    with torch.no_grad():
        plain, ours = model(*inputs()), model(*inputs(), attend)
        assert not torch.allclose(plain, model(*inputs(), lambda layer, query, key, value: value), atol=1e-3)
    assert torch.equal(plain, ours)
    assert seen == [(layer, *[(2, 2, 60, 128)] * 3) for layer in range(2)]


def test_sampling_gives_every_step_its_attention(training):
    sampling, wan = training("sampling"), training("wan")
    steps = []

    def attend_at(step):
        steps.append(step)
        return lambda layer, query, key, value: wan.torch_attention(query, key, value)

    noise = sampling.start_noise([3, 4], frames=2, height=32, width=32)
    assert torch.equal(noise[1:], sampling.start_noise([4], frames=2, height=32, width=32))
    text = torch.randn(3, 8, 64, generator=torch.Generator().manual_seed(0))
    model = rough(training)
    latents = sampling.sample(model, noise, text[:2], text[2:], sampling.noise_levels(3), attend_at=attend_at)
    assert steps == [0, 1, 2]
    alone = sampling.sample(model, noise[1:], text[1:2], text[2:], sampling.noise_levels(3))
    assert torch.allclose(latents[1:], alone, atol=1e-4)


# Training


@pytest.fixture
def tiny(training, monkeypatch):
    train = training("train")
    monkeypatch.setattr(train, "SIZES", (train.Size(2, 32, 32, 0.5), train.Size(3, 32, 32, 0.5)))
    return train


def arguments(folder, *more):
    sizes = ["--tokens", "96", "--layers", "1", "--warmup", "2", "--device", "cpu", "--no-compile"]
    return ["--output", str(folder), *sizes, *map(str, more)]


def test_training_learns_is_logged_and_goes_on_where_it_stopped(training, tiny, tmp_path):
    tiny.main(arguments(tmp_path / "a", "--steps", 30))
    rows = [json.loads(line) for line in (tmp_path / "a" / "log.jsonl").open()]
    assert [row["step"] for row in rows] == [20, 30]
    untrained = tiny.Run(tiny.parse(arguments(tmp_path / "untrained"))).validate()
    for name, errors in untrained.items():
        assert rows[1][name]["0.95"] < errors["0.95"] - 0.02
        assert set(rows[1][name]) == {"0.2", "0.5", "0.8", "0.95"}
    tiny.main(arguments(tmp_path / "b", "--steps", 31, "--resume", tmp_path / "a" / "state.pt"))
    (row,) = [json.loads(line) for line in (tmp_path / "b" / "log.jsonl").open()]
    assert row["step"] == 31
    assert row["validation"] != rows[1]["validation"]
    assert row["validation"]["0.95"] < untrained["validation"]["0.95"] - 0.02
    model, table, texts = training("checkpoint").load(tmp_path / "b")
    assert table.shape == (16, 8, 64)
    assert list(texts) == [prompt.text for prompt in training("prompts").PROMPTS]
    assert model.head.head.weight.abs().max() > 0


def test_training_goes_on_from_the_shipped_weights_though_prompts_were_added(training, tiny, tmp_path):
    weights, (model, table, texts) = training("demo_files").WEIGHTS, training("checkpoint").load()
    more = ("--layers", len(model.blocks), "--start", weights, "--seed", 2)
    run = tiny.Run(tiny.parse(arguments(tmp_path / "start", *more)))
    prompts = [prompt.text for prompt in training("prompts").PROMPTS]
    grown = run.average["table"]
    assert all(torch.equal(grown[prompts.index(text)], table[place]) for place, text in enumerate(texts))
    assert torch.equal(grown[-1], table[-1])
    new = [place for place, text in enumerate(prompts) if text not in texts]
    assert torch.equal(grown[new], tiny.Trained(run.sizes, 2).table[new])
    latents, timestep, text = inputs()
    with torch.no_grad():
        assert torch.equal(run.trained.model(latents, timestep, text), model(latents, timestep, text))
    tiny.main(arguments(tmp_path / "on", "--steps", 3, *more))
    trained, on, names = training("checkpoint").load(tmp_path / "on")
    assert list(names) == prompts
    assert 0 < (trained.head.head.weight - model.head.head.weight).abs().max() < 0.01
    assert (on[: len(texts)] - grown[: len(texts)]).abs().max() < 0.05


def test_validation_shows_the_same_clips_of_the_first_prompts_as_ever(training, tiny):
    """Drawn as before words and photographs came: its errors go on from the shipped log."""
    scenes = training("scenes")
    kinds = torch.tensor(tiny.VALIDATION_KINDS["validation"])
    assert kinds.tolist() == list(range(12)) * 2
    random = torch.Generator().manual_seed(tiny.VALIDATION_SEED)
    expected = scenes.render(scenes.draw_scenes(kinds, random, "cpu"), 2, 32, 32)
    random = torch.Generator().manual_seed(tiny.VALIDATION_SEED)
    assert torch.equal(training("clips").Clips("cpu").draw(kinds, random, 2, 32, 32), expected)
    assert set(tiny.VALIDATION_KINDS["validation_pictures"]) == {12, 13, 14}


def test_a_batch_depends_on_its_step_only(tiny):
    def data():
        return tiny.Data(torch.device("cpu"), 96, 0)

    size, *first = data().batch(7)
    again_size, *again = data().batch(7)
    assert size == again_size
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    latents, noise, level, kinds = first
    assert latents.shape == noise.shape
    assert len(latents) == 96 // size.tokens == len(level) == len(kinds)


def test_a_resumed_log_keeps_the_later_row_of_a_step(training, tmp_path):
    rows = [{"step": 20, "loss": 1.0}, {"step": 40, "loss": 0.8}, {"step": 40, "loss": 0.5}]
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    curve = training("curve")
    assert [row["loss"] for row in curve.read(tmp_path / "log.jsonl")] == [1.0, 0.5]
    assert curve.running_mean([1.0, 0.0]) == pytest.approx([1.0, 0.9])


def test_the_shipped_log_is_one_line_of_steps_over_its_runs(training):
    """Joined from the logs of trainings that each started from the weights of the one before."""
    curve = training("curve")
    path = ROOT / "training" / "results" / "log.jsonl"
    rows = curve.read(path)
    assert len(rows) == len(path.read_text(encoding="utf-8").splitlines())
    runs = [row["run"] for row in rows]
    assert runs == sorted(runs)
    assert set(runs) == set(range(1, max(runs) + 1))
    assert curve.starts(rows)[0] == 3488
    assert len(curve.starts(rows)) == max(runs) - 1
    assert curve.starts([{"step": 1}, {"step": 2}]) == []


def test_a_training_that_went_on_is_joined_to_the_log(training, tmp_path):
    log, more = tmp_path / "log.jsonl", tmp_path / "more.jsonl"
    log.write_text(json.dumps({"run": 2, "step": 40, "loss": 0.5}) + "\n")
    more.write_text(json.dumps({"step": 20, "loss": 0.4}) + "\n")
    curve = training("curve")
    curve.write(curve.join(curve.read(log), curve.read(more)), log)
    assert curve.read(log) == [{"run": 2, "step": 40, "loss": 0.5}, {"run": 3, "step": 60, "loss": 0.4}]
    assert curve.starts(curve.read(log)) == [40]


# The shipped weights


def test_the_shipped_weights_are_the_trained_prompts_model(training):
    checkpoint = training("checkpoint")
    model, table, texts = checkpoint.load()
    assert list(texts) == [prompt.text for prompt in training("prompts").PROMPTS]
    assert len(table) == len(texts) + 1
    files = training("demo_files")
    assert files.MODEL.stat().st_size < 16_000_000
    prompt, empty = files.prompt_embeddings(texts[3])
    assert torch.equal(prompt[0], table[3])
    assert torch.equal(empty[0], table[-1])
