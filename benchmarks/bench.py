"""Time VC-Attention and every peer found on this machine in one interleaved run; append rows to benchmarks/results/.

    python benchmarks/bench.py [--shapes 1x40x75600,1x12x32768] [--seconds 0.35] [--rounds 2] [--output DIR]

Needs a GPU with a VC-Attention kernel. Useful work is counted as 4 B H S^2 D FLOP. Inputs are normal, bf16, in
ComfyUI's layout [B, S, H, D]; the error is relative L2 on sampled rows against attention in float32 on the same inputs.
The kernel alone is measured as shipped and with one trick switched off at a time, on normal and on clustered inputs.
"""

from __future__ import annotations

import argparse
import sys
import uuid
from collections.abc import Callable
from pathlib import Path

import peers
import rows
import sage_formats
import torch
from timing import Samples, interleave
from vc_attention import attention, group_values, support
from vc_attention.attend.cuda import attend_cuda
from vc_attention.group.api import Grouping
from vc_attention.quantize.cuda import prepare
from vc_attention.quantize.rotation import hadamard_matrix
from vc_attention.testing import clustered_qkv, relative_l2

HEAD_DIM = 128
DEFAULT_SHAPES = "1x40x75600,1x12x32768,1x16x111600"  # Wan2.2-14B 720p, a small model, HunyuanVideo 1.5 720p
SAMPLED_ROWS = 128
CLUSTERED_GRID = (13, 42, 60)  # 32,760 tokens
SCHEDULE_STEPS, REFRESH_INTERVAL = 40, 4
WINDOWS = (0.25, 1.0)
PRECISE = "8-bit precise"
BEHIND_WORK = ", behind work"  # end of the settings of what is timed with a full queue
SAGE_FORMATS = "sageattention2_formats (emulated)"


def main() -> int:
    options = _options()
    run = {"run": uuid.uuid4().hex[:12], **rows.environment()}
    peak = fp8_peak()
    output = options.output or rows.RESULTS
    path = output / f"{run['gpu'].lower().replace(' ', '-')}.jsonl"
    print(f"{run['gpu']}, FP8 product 8192^3: {peak:.0f} TFLOP/s", flush=True)
    for shape in options.shapes.split(","):
        batch, heads, tokens = (int(size) for size in shape.split("x"))
        made = bench_shape((batch, heads, tokens, HEAD_DIM), options)
        for row in made:
            row |= {"peak_tflops": peak}
            if row.get("tflops"):
                row["peak_share"] = row["tflops"] / peak
        rows.append([{**run, **row} for row in made], path)
    rows.append([{**run, **row} for row in clustered_errors()], path)
    print(f"rows appended to {path}")
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default=DEFAULT_SHAPES, help="BxHxS, comma separated")
    parser.add_argument("--seconds", type=float, default=0.35, help="of every variant in every round")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--output", type=Path, help="folder for the rows instead of benchmarks/results")
    return parser.parse_args()


def fp8_peak() -> float:
    """TFLOP/s of an FP8 product by the vendor's library, sustained for a second on random numbers: the ceiling."""
    size = 8192
    a, b = (torch.randn(size, size, device="cuda").to(torch.float8_e4m3fn) for _ in range(2))
    one = torch.ones((), device="cuda")

    def product():
        return torch._scaled_mm(a, b.T, one, one, out_dtype=torch.bfloat16, use_fast_accum=True)

    samples = interleave({"product": product}, rounds=2, seconds_per_turn=0.6)["product"]
    return 2 * size**3 / samples.quantile(0.5) / 1e9


def bench_shape(shape: tuple[int, int, int, int], options: argparse.Namespace) -> list[dict]:
    """Rows of one shape: our kernel and its ablations, the complete call, peers, grouping, scratch memory."""
    q, k, v = normal_inputs(shape)
    grouping = group_values(v)
    expected = ReferenceRows(q, k, v)
    variants = {
        **named("attention_kernel", "cuda", kernel_variants(q, k, v, grouping)),
        **named("complete_call", "cuda", complete_calls(q, k, v, grouping)),
        **{("complete_call", name, ""): call for name, call in peers.found(q, k, v).items()},
        **named("prepare", "cuda", twice({"held grouping": lambda: prepared(q, k, v, grouping.permutation)})),
        **named(
            "regroup_extra", "cuda", twice({"warm": lambda: group_values(v, grouping), "cold": lambda: group_values(v)})
        ),
    }
    made = []
    timed = interleave(variants, options.rounds, options.seconds, lambda key: key[2].endswith(BEHIND_WORK))
    for key, samples in timed.items():
        row = timed_row(key, samples, shape, grouping)
        if row["operation"] in ("attention_kernel", "complete_call"):
            row["rel_l2"] = expected.error(variants[key]())
        made.append(row)
    made += [schedule_row(made, shape, window) for window in WINDOWS]
    made.append(scratch_row(q, k, v, grouping, shape))
    made.append(error_row("error_normal", SAGE_FORMATS, "", shape, expected.sage_formats_error()))
    for row in made:
        print(summary(row), flush=True)
    return made


def twice(calls: dict[str, Callable]) -> dict[str, Callable]:
    """Calls by settings, to be timed alone, where short ones wait for the host, and behind other work."""
    return calls | {settings + BEHIND_WORK: call for settings, call in calls.items()}


def named(operation: str, implementation: str, calls: dict[str, Callable]) -> dict[tuple[str, str, str], Callable]:
    """Calls by (operation, implementation, settings), from calls by settings."""
    return {(operation, implementation, settings): call for settings, call in calls.items()}


def prepared(q, k, v, permutation, **switches):
    """Operands of the attention kernel."""
    return prepare(q, k, v, scale=HEAD_DIM**-0.5, permutation=permutation, **switches)


def kernel_variants(q, k, v, grouping: Grouping) -> dict[str, Callable[[], torch.Tensor]]:
    """The attention kernel on prepared operands: as shipped, and with one trick switched off at a time.

    The preparation rotates q and k by a symmetric orthogonal matrix, so rotated inputs leave it as they were.
    """

    def variant(q=q, k=k, permutation=grouping.permutation, demean: bool = True, **switches):
        operands = prepared(q, k, v, permutation, demean=demean)
        output = torch.empty_like(q)

        def run() -> torch.Tensor:
            attend_cuda(operands, output, means=demean, **switches)
            return output

        return run

    return {
        "as shipped": variant(),
        "means off": variant(demean=False),
        "grouping off": variant(permutation=None),
        "expcast off": variant(probabilities="exp2"),
        "rotation off": variant(rotated(q), rotated(k)),
    }


def rotated(x: torch.Tensor) -> torch.Tensor:
    """[B, H, S, D] times the Hadamard matrix of the preparation, rounded to the dtype of ``x``."""
    return (x.float() @ hadamard_matrix(x.shape[-1], device=x.device).float()).to(x.dtype)


def complete_calls(q, k, v, grouping: Grouping) -> dict[str, Callable[[], torch.Tensor]]:
    """The public call, in every 8-bit mode of this machine."""
    calls = {
        "held grouping": lambda: attention(q, k, v, grouping=grouping),
        "sequence order": lambda: attention(q, k, v),
    }
    if support(q, k, v, mode=PRECISE, implementation="cuda"):
        calls["precise, held grouping"] = lambda: attention(q, k, v, grouping=grouping, mode=PRECISE)
    return calls


def timed_row(key: tuple[str, str, str], samples: Samples, shape, grouping: Grouping) -> dict:
    """The row of one timed variant."""
    row = dict(zip(("operation", "implementation", "settings"), key, strict=True)) | {"shape": list(shape)}
    row |= {"dtype": "bfloat16", "layout": "BSHD", "clusters": grouping.clusters, **samples.row()}
    if row["operation"] in ("attention_kernel", "complete_call"):
        row["tflops"] = 4 * shape[0] * shape[1] * shape[2] ** 2 * shape[3] / row["ms_p50"] / 1e9
    return row


def error_row(operation: str, implementation: str, settings: str, shape, error: float) -> dict:
    """The row of an error without a time."""
    names = {"operation": operation, "implementation": implementation, "settings": settings}
    return names | {"shape": list(shape), "dtype": "bfloat16", "rel_l2": error}


def normal_inputs(shape: tuple[int, int, int, int]) -> list[torch.Tensor]:
    """q, k, v [B, H, S, D] as views of memory [B, S, H, D], the way ComfyUI's Wan hands them over."""
    batch, heads, tokens, head_dim = shape
    generator = torch.Generator("cuda").manual_seed(0)
    options = {"generator": generator, "device": "cuda", "dtype": torch.bfloat16}
    return [torch.randn(batch, tokens, heads, head_dim, **options).transpose(1, 2) for _ in range(3)]


class ReferenceRows:
    """Attention in float32 of sampled query rows, the last one among them."""

    def __init__(self, q, k, v):
        generator = torch.Generator().manual_seed(1)
        self.rows = torch.randperm(q.shape[2], generator=generator)[:SAMPLED_ROWS].to(q.device)
        self.rows[0] = q.shape[2] - 1
        self.inputs = (q, k, v)
        heads = [self._head(q[:, h], k[:, h], v[:, h]) for h in range(q.shape[1])]
        self.expected = torch.stack(heads, dim=1)

    def _head(self, q, k, v):
        scores = q[:, self.rows].float() @ k.float().transpose(1, 2) * q.shape[-1] ** -0.5
        return torch.softmax(scores, -1) @ v.float()

    def error(self, output) -> float:
        """Relative L2 error of an output [B, H, S, D] on the sampled rows."""
        return relative_l2(output[:, :, self.rows], self.expected)

    def sage_formats_error(self) -> float:
        """The same error of SageAttention2's number formats, emulated, and rounded to the inputs' dtype."""
        output = sage_formats.attend_rows(*self.inputs, self.rows)
        return relative_l2(output.to(self.inputs[0].dtype), self.expected)


def schedule_row(made: list[dict], shape, window: float) -> dict:
    """Grouping averaged over a render, as a share of the complete call: cold once, then warm while the window lasts.

    In a render the queue is full: the host prepares a call while the one before runs.
    """
    times = {(row["operation"], row["settings"]): row["ms_p50"] for row in made if row["implementation"] == "cuda"}
    groupings = len(range(0, round(SCHEDULE_STEPS * window), REFRESH_INTERVAL))
    cold, warm = (times["regroup_extra", settings + BEHIND_WORK] for settings in ("cold", "warm"))
    spent = cold + (groupings - 1) * warm
    return {
        "operation": "grouping_average",
        "implementation": "cuda",
        "settings": f"{SCHEDULE_STEPS} steps, window {window}, interval {REFRESH_INTERVAL}",
        "shape": list(shape),
        "share_of_call": spent / SCHEDULE_STEPS / times["complete_call", "held grouping"],
    }


def scratch_row(q, k, v, grouping, shape) -> dict:
    """Peak memory of a complete call beyond its inputs and its output, in bytes and as a share of q8 + k8 + v8."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    output = attention(q, k, v, grouping=grouping)
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before - output.numel() * output.element_size()
    eight_bit = 3 * q.numel()
    return {
        "operation": "scratch_bytes",
        "implementation": "cuda",
        "settings": "held grouping",
        "shape": list(shape),
        "bytes": peak,
        "share_of_8bit_tensors": peak / eight_bit,
    }


def clustered_errors() -> list[dict]:
    """Errors on values that cluster and have outlier tokens, as a video layer's do (vc_attention.testing)."""
    q, k, v = clustered_qkv(CLUSTERED_GRID, heads=2, dtype=torch.bfloat16, device="cuda")
    expected, grouping = ReferenceRows(q, k, v), group_values(v)
    calls = {
        **{("cuda", f"kernel, {name}"): call for name, call in kernel_variants(q, k, v, grouping).items()},
        **{("cuda", name): call for name, call in complete_calls(q, k, v, grouping).items()},
        **{(name, ""): call for name, call in peers.found(q, k, v).items()},
    }
    errors = {key: expected.error(call()) for key, call in calls.items()}
    errors[SAGE_FORMATS, ""] = expected.sage_formats_error()
    made = [error_row("error_clustered", *key, q.shape, error) for key, error in errors.items()]
    for row in made:
        print(summary(row), flush=True)
    return made


def summary(row: dict) -> str:
    """One line for a person."""
    parts = [f"{row['operation']:17s} {row['implementation']:18s} {row['settings']:33s} {row['shape']}"]
    for name, text in (
        ("ms_p50", "{:.3f} ms"),
        ("tflops", "{:.0f} TFLOP/s"),
        ("rel_l2", "error {:.4f}"),
        ("watts", "{:.0f} W"),
        ("share_of_call", "{:.2%} of the call"),
        ("share_of_8bit_tensors", "{:.3f} of the 8-bit tensors"),
    ):
        if row.get(name) is not None:
            parts.append(text.format(row[name]))
    return "  ".join(parts)


if __name__ == "__main__":
    sys.exit(main())
