"""Trains the demo's video model by flow matching, on one GPU, resumable.

    make train
    python training/train.py --minutes 10 --output /tmp/train          # as far as ten minutes go
    python training/train.py --resume /tmp/train/state.pt --output /tmp/train

Writes into the output folder: the two files of checkpoint.py (averaged weights), state.pt to resume from, and
log.jsonl with one row for every LOG_EVERY steps.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent / "nodes"))

import checkpoint  # noqa: E402
import demo_latents  # noqa: E402
from clips import Clips  # noqa: E402
from prompts import PROMPTS  # noqa: E402
from sampling import SHIFT, TIMESTEPS  # noqa: E402
from wan import WanModel, WanSizes, initialize  # noqa: E402

TEXT_TOKENS = 8
LOG_EVERY = 20
VALIDATE_EVERY = 200
VALIDATION_LEVELS = (0.2, 0.5, 0.8, 0.95)
VALIDATION_SEED = 2**40
VALIDATION_KINDS = {
    "validation": 2 * tuple(range(12)),  # the drawn scenes: the same clips since the first training
    "validation_pictures": 4 * tuple(range(12, len(PROMPTS))),  # words and photographs
}
EMA_DECAY = 0.999
PROMPT_DROPOUT = 0.1
MOST_GRADIENT = 1.0
ATTENTION = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


@dataclass(frozen=True)
class Size:
    """Frames and pixels of a clip, and how often it is drawn."""

    frames: int
    height: int
    width: int
    share: float

    @property
    def tokens(self) -> int:
        return self.frames * (self.height // 8) * (self.width // 8)


SIZES = (
    Size(8, 128, 128, 0.25),
    Size(16, 96, 128, 0.1),
    Size(16, 128, 128, 0.4),
    Size(32, 128, 128, 0.15),
    Size(64, 128, 128, 0.05),
    Size(16, 256, 256, 0.05),
)


class Trained(nn.Module):
    """The model and the prompts' embeddings, which are trained with it."""

    def __init__(self, sizes: WanSizes, seed: int):
        super().__init__()
        self.model = WanModel(sizes)
        initialize(self.model, seed)
        random = torch.Generator().manual_seed(seed + 1)
        self.table = nn.Parameter(torch.randn(len(PROMPTS) + 1, TEXT_TOKENS, sizes.text, generator=random))

    def forward(self, latents: Tensor, level: Tensor, kinds: Tensor) -> Tensor:
        return self.model(latents, level * TIMESTEPS, self.table[kinds])


class Data:
    """Batches by step: the same step gives the same clips, noise and levels, however often training was resumed."""

    def __init__(self, device: torch.device, tokens: int, seed: int):
        self.device, self.tokens, self.seed = device, tokens, seed
        self.clips = Clips(device)
        self.weights = torch.tensor([prompt.weight for prompt in PROMPTS])

    def batch(self, step: int) -> tuple[Size, Tensor, Tensor, Tensor, Tensor]:
        """Size, clean latents, noise, noise levels [B] and prompts [B] (the last number: no prompt)."""
        random = torch.Generator().manual_seed(self.seed * 1_000_003 + step)
        shares = torch.tensor([size.share for size in SIZES])
        size = SIZES[int(torch.multinomial(shares, 1, generator=random))]
        count = max(1, self.tokens // size.tokens)
        kinds = torch.multinomial(self.weights, count, replacement=True, generator=random)
        latents = self.latents(kinds, random, size)
        share = (torch.arange(count) + torch.rand(count, generator=random)) / count
        level = SHIFT * share / (1.0 + (SHIFT - 1.0) * share)
        dropped = torch.rand(count, generator=random) < PROMPT_DROPOUT
        kinds = torch.where(dropped, len(PROMPTS), kinds)
        noise = self.noise(latents, int(torch.randint(2**31, (1,), generator=random)))
        return size, latents, noise, level.to(self.device), kinds.to(self.device)

    @torch.no_grad()
    def latents(self, kinds: Tensor, random: torch.Generator, size: Size) -> Tensor:
        return demo_latents.encode(self.clips.draw(kinds, random, size.frames, size.height, size.width))

    def noise(self, like: Tensor, seed: int) -> Tensor:
        return torch.randn(like.shape, device=self.device, generator=torch.Generator(self.device).manual_seed(seed))


def velocity_error(trained: Trained, latents: Tensor, noise: Tensor, level: Tensor, kinds: Tensor) -> Tensor:
    """Mean squared error of the predicted velocity of each clip, [B]."""
    weight = level.view(-1, 1, 1, 1, 1)
    with torch.autocast(latents.device.type, torch.bfloat16, enabled=latents.is_cuda):
        predicted = trained(torch.lerp(latents, noise, weight), level, kinds)
    return (predicted.float() - (noise - latents)).square().mean((1, 2, 3, 4))


def build_optimizer(trained: Trained, rate: float) -> torch.optim.Optimizer:
    """AdamW; matrices decay, vectors and the embeddings do not."""
    decayed, kept = [], []
    for name, parameter in trained.named_parameters():
        (decayed if parameter.ndim == 2 and "modulation" not in name else kept).append(parameter)
    groups = [{"params": decayed, "weight_decay": 0.02}, {"params": kept, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.98), eps=1e-10, fused=next(iter(kept)).is_cuda)


class Run:
    """One training: model, average, optimizer and how far they are."""

    def __init__(self, options: argparse.Namespace):
        self.options = options
        self.device = torch.device(options.device)
        self.sizes = WanSizes(layers=options.layers)
        self.trained = Trained(self.sizes, options.seed).to(self.device)
        self.average = {name: value.detach().clone() for name, value in self.trained.state_dict().items()}
        self.optimizer = build_optimizer(self.trained, options.rate)
        self.step = 0
        self.seconds = 0.0
        self.first_step = 0
        if options.start:
            self.start_from(options.start)
        if options.resume:
            self.load(options.resume)
        if options.compile:
            torch._dynamo.config.cache_size_limit = 64
            for block in self.trained.model.blocks:
                block.compile(dynamic=True)
        self.data = Data(self.device, options.tokens, options.seed)
        self.output = options.output
        self.output.mkdir(parents=True, exist_ok=True)
        self.log = (self.output / "log.jsonl").open("a", encoding="utf-8")
        self.started = time.monotonic()

    def progress(self) -> float:
        """Share of this run that is done: by steps, or by time where that ends it first."""
        spent = (time.monotonic() - self.started) / (60.0 * self.options.minutes)
        return max((self.step - self.first_step) / max(1, self.options.steps - self.first_step), spent)

    def rate(self, progress: float) -> float:
        warm = min(1.0, (self.step - self.first_step + 1) / self.options.warmup)
        return self.options.rate * warm * (0.02 + 0.98 * 0.5 * (1.0 + math.cos(math.pi * min(1.0, progress))))

    def train_step(self) -> tuple[Tensor, Size]:
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate(self.progress())
        size, *batch = self.data.batch(self.step)
        loss = velocity_error(self.trained, *batch).mean()
        loss.backward()
        nn.utils.clip_grad_norm_(self.trained.parameters(), MOST_GRADIENT)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        decay = min(EMA_DECAY, (1 + self.step) / (10 + self.step))
        current = self.trained.state_dict()
        torch._foreach_lerp_(list(self.average.values()), [current[name] for name in self.average], 1.0 - decay)
        self.step += 1
        return loss.detach(), size

    @torch.no_grad()
    def validate(self) -> dict[str, dict[str, float]]:
        """Error of the averaged weights for each of VALIDATION_KINDS, on clips that training never sees."""
        kept = {name: value.clone() for name, value in self.trained.state_dict().items()}
        self.trained.load_state_dict(self.average)
        errors = {name: self.errors(torch.tensor(kinds)) for name, kinds in VALIDATION_KINDS.items()}
        self.trained.load_state_dict(kept)
        return errors

    def errors(self, kinds: Tensor) -> dict[str, float]:
        """Mean error at fixed noise levels on one clip for each of ``kinds``, always the same ones."""
        random = torch.Generator().manual_seed(VALIDATION_SEED)
        size = Size(16, 128, 128, 1.0) if self.device.type == "cuda" else Size(2, 32, 32, 1.0)
        latents = self.data.latents(kinds, random, size)
        noise = self.data.noise(latents, 1)
        errors = {}
        for value in VALIDATION_LEVELS:
            level = torch.full((len(kinds),), value, device=self.device)
            error = velocity_error(self.trained, latents, noise, level, kinds.to(self.device))
            errors[f"{value:g}"] = round(float(error.mean()), 5)
        return errors

    def run(self) -> None:
        recent: list[Tensor] = []
        tokens = 0
        since = saved = self.started
        while (progress := self.progress()) < 1.0:
            loss, size = self.train_step()
            recent.append(loss)
            tokens += max(1, self.options.tokens // size.tokens) * size.tokens
            if self.step % LOG_EVERY and self.progress() < 1.0:
                continue
            row = {"step": self.step, "loss": round(float(torch.stack(recent).mean()), 5)}
            now = time.monotonic()
            row["rate"] = round(self.rate(progress), 7)
            row["seconds"] = round(self.seconds + now - self.started, 1)
            row["tokens_per_s"] = round(tokens / (now - since))
            if self.step % VALIDATE_EVERY == 0 or self.progress() >= 1.0:
                row |= self.validate()
            self.write(row)
            if now - saved > self.options.save_every:
                self.save()
                saved = now
            recent, tokens, since = [], 0, time.monotonic()
        self.save()

    def write(self, row: dict) -> None:
        if not math.isfinite(row["loss"]):
            raise FloatingPointError(f"the loss at step {self.step} is {row['loss']}")
        print(json.dumps(row), flush=True)
        self.log.write(json.dumps(row) + "\n")
        self.log.flush()

    def save(self) -> None:
        """The files of both hosts, and the state to resume from; each replaced whole."""
        weights = {name.removeprefix("model."): value for name, value in self.average.items() if name != "table"}
        texts = tuple(prompt.text for prompt in PROMPTS)
        checkpoint.save(self.output / "new", self.sizes, weights, self.average["table"], texts)
        for name in (checkpoint.MODEL_FILE, checkpoint.PROMPTS_FILE):
            os.replace(self.output / "new" / name, self.output / name)
        seconds = self.seconds + time.monotonic() - self.started
        state = {"step": self.step, "seconds": seconds, "average": self.average}
        state |= {"trained": self.trained.state_dict(), "optimizer": self.optimizer.state_dict()}
        torch.save(state, self.output / "new" / "state.pt")
        os.replace(self.output / "new" / "state.pt", self.output / "state.pt")

    def start_from(self, folder: Path) -> None:
        """Averaged weights of an earlier training, without its optimizer; prompts that it lacked start anew."""
        model, known, texts = checkpoint.load(folder, self.device)
        self.trained.model.load_state_dict(model.state_dict())
        with torch.no_grad():
            self.trained.table[-1] = known[-1]
            for place, prompt in enumerate(PROMPTS):
                if prompt.text in texts:
                    self.trained.table[place] = known[texts.index(prompt.text)]
        self.average = {name: value.detach().clone() for name, value in self.trained.state_dict().items()}

    def load(self, path: Path) -> None:
        state = torch.load(path, map_location=self.device, weights_only=True)
        self.trained.load_state_dict(state["trained"])
        self.average = state["average"]
        self.optimizer.load_state_dict(state["optimizer"])
        self.step = self.first_step = state["step"]
        self.seconds = state["seconds"]


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    torch.set_float32_matmul_precision("high")
    with sdpa_kernel(ATTENTION, set_priority=True):
        Run(options).run()
    return 0


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=HERE / "output")
    parser.add_argument("--resume", type=Path, help="a state.pt; the learning rate starts anew")
    parser.add_argument("--start", type=Path, help="a folder with the model's two files to start from")
    parser.add_argument("--steps", type=int, default=20_000, help="last step, counted over all resumed runs")
    parser.add_argument("--minutes", type=float, default=180.0, help="stop earlier, with the rate brought down in time")
    parser.add_argument("--tokens", type=int, default=65_536, help="of a batch")
    parser.add_argument("--rate", type=float, default=1.5e-3)
    parser.add_argument("--warmup", type=int, default=200, help="steps")
    parser.add_argument("--layers", type=int, default=WanSizes.layers)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save-every", type=float, default=60.0, help="seconds")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=torch.cuda.is_available())
    return parser.parse_args(arguments)


if __name__ == "__main__":
    raise SystemExit(main())
