"""Time VC-Attention and every peer found on this machine in one interleaved run; append rows to benchmarks/results/.

    python benchmarks/bench.py [--shapes 1x40x75600,1x12x32768] [--seconds 1.0] [--rounds 2] [--output DIR]

Needs a GPU with a VC-Attention kernel. Useful work is counted as 4 B H S^2 D FLOP. Inputs are normal, bf16, in
ComfyUI's layout [B, S, H, D]; the error is relative L2 on sampled rows against attention in float32 on the same inputs.
"""

from __future__ import annotations

import argparse
import sys
import uuid
from pathlib import Path

import peers
import rows
import torch
from timing import interleave
from vc_attention import attention, group_values
from vc_attention.attend.cuda import attend_cuda
from vc_attention.quantize.cuda import prepare
from vc_attention.testing import clustered_qkv, relative_l2

HEAD_DIM = 128
DEFAULT_SHAPES = "1x40x75600,1x12x32768,1x16x111600"  # Wan2.2-14B 720p, a small model, HunyuanVideo 1.5 720p
SAMPLED_ROWS = 128
CLUSTERED_GRID = (13, 42, 60)  # 32,760 tokens
SCHEDULE_STEPS, SCHEDULE_REFRESHES = 40, 3  # window 0.25, interval 4: one cold grouping and two warm ones


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
    parser.add_argument("--seconds", type=float, default=1.0, help="of every variant in every round")
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
    """Rows of one shape: peers, our kernel, the complete call, grouping, scratch memory."""
    q, k, v = normal_inputs(shape)
    grouping = group_values(v)
    scale = HEAD_DIM**-0.5
    operands = prepare(q, k, v, scale=scale, permutation=grouping.permutation)
    out = torch.empty_like(q)

    def kernel(means: bool = True):
        attend_cuda(operands, out, means=means)
        return out

    variants = {
        ("attention_kernel", "cuda", "int8 qk, expcast, means"): kernel,
        ("attention_kernel", "cuda", "int8 qk, expcast, no means"): lambda: kernel(means=False),
        ("complete_call", "cuda", "held grouping"): lambda: attention(q, k, v, grouping=grouping),
        ("complete_call", "cuda", "sequence order"): lambda: attention(q, k, v),
        ("prepare", "cuda", "held grouping"): lambda: prepare(q, k, v, scale=scale, permutation=grouping.permutation),
        ("regroup_extra", "cuda", "warm"): lambda: group_values(v, grouping),
        ("regroup_extra", "cuda", "cold"): lambda: group_values(v),
        **{("complete_call", name, ""): _bind(peer, q, k, v) for name, peer in peers.found().items()},
    }
    samples = interleave(variants, options.rounds, options.seconds)
    expected = ReferenceRows(q, k, v)
    made = []
    for (operation, implementation, settings), timed in samples.items():
        row = {"operation": operation, "implementation": implementation, "settings": settings, "shape": list(shape)}
        row |= {"dtype": "bfloat16", "layout": "BSHD", "clusters": grouping.clusters, **timed.row()}
        if operation in ("attention_kernel", "complete_call"):
            row["tflops"] = 4 * shape[0] * shape[1] * shape[2] ** 2 * shape[3] / row["ms_p50"] / 1e9
            if "no means" not in settings:  # the operands are demeaned: without the means only the time is meant
                row["rel_l2"] = expected.error(variants[operation, implementation, settings]())
        made.append(row)
        print(summary(row), flush=True)
    made += [schedule_row(made, shape), scratch_row(q, k, v, grouping, shape)]
    for row in made[-2:]:
        print(summary(row), flush=True)
    return made


def _bind(function, *arguments):
    return lambda: function(*arguments)


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
        heads = [self._head(q[:, h], k[:, h], v[:, h]) for h in range(q.shape[1])]
        self.expected = torch.stack(heads, dim=1)

    def _head(self, q, k, v):
        scores = q[:, self.rows].float() @ k.float().transpose(1, 2) * q.shape[-1] ** -0.5
        return torch.softmax(scores, -1) @ v.float()

    def error(self, output) -> float:
        """Relative L2 error of an output [B, H, S, D] on the sampled rows."""
        return relative_l2(output[:, :, self.rows], self.expected)


def schedule_row(made: list[dict], shape) -> dict:
    """Grouping averaged over a 40-step render with window 0.25 and interval 4, as a share of the complete call."""
    times = {(row["operation"], row["settings"]): row["ms_p50"] for row in made if row["implementation"] == "cuda"}
    spent = times["regroup_extra", "cold"] + (SCHEDULE_REFRESHES - 1) * times["regroup_extra", "warm"]
    share = spent / SCHEDULE_STEPS / times["complete_call", "held grouping"]
    return {
        "operation": "grouping_average",
        "implementation": "cuda",
        "settings": f"{SCHEDULE_STEPS} steps, window 0.25, interval 4",
        "shape": list(shape),
        "share_of_call": share,
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
    variants = {
        ("cuda", "k-means"): lambda: attention(q, k, v, grouping=grouping),
        ("cuda", "sequence order"): lambda: attention(q, k, v),
        ("cuda", "means off"): lambda: attention(q, k, v, demean=False),
        **{(name, ""): _bind(peer, q, k, v) for name, peer in peers.found().items()},
    }
    made = []
    for (implementation, settings), call in variants.items():
        row = {"operation": "error_clustered", "implementation": implementation, "settings": settings}
        row |= {"shape": list(q.shape), "dtype": "bfloat16", "rel_l2": expected.error(call())}
        made.append(row)
        print(summary(row), flush=True)
    return made


def summary(row: dict) -> str:
    """One line for a person."""
    parts = [f"{row['operation']:17s} {row['implementation']:18s} {row['settings']:28s} {row['shape']}"]
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
