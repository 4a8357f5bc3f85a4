"""Time VC-Attention and every peer found on this machine in one interleaved run; append rows to benchmarks/results/.

    python benchmarks/bench.py [--quick] [--shapes 1x40x75600,1x12x32768] [--seconds 0.2] [--rounds 2] [--output DIR]

Needs a GPU with a VC-Attention kernel. Useful work is counted as 4 B H S^2 D FLOP. Inputs are normal, bf16, in
ComfyUI's layout [B, S, H, D]; the error is relative L2 on sampled rows against attention in float32 on the same inputs.
The kernel and the complete call have turns of their own, each followed by one of cuDNN's, so that all meet a card of
the same heat; the rows "..._over_cudnn" are medians over these pairs of turns. For what a call adds to the kernel and a
regrouping to a call, the three alternate call by call (settings that end in "alternating"). At the largest shape the
kernel is also measured with one trick switched off at a time, on normal and clustered inputs and with a loud channel in
k. Times are with a full queue, as in a render; rows whose settings end in "empty queue" include what the GPU waits for
the host.

--quick leaves out peers, ablations and emulations, and writes rows only to a folder given by --output: the README is
drawn from the newest whole run.
"""

from __future__ import annotations

import argparse
import math
import sys
import uuid
from collections.abc import Callable
from pathlib import Path
from statistics import median

import peers
import rows
import sage_formats
import torch
from table import BASELINE, NOTHING_OFF
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
LOUD_CHANNEL = 16.0
SCHEDULE_STEPS, REFRESH_INTERVAL = 40, 4
WINDOWS = (0.25, 1.0)
HEAT_SECONDS = 2.0  # of the kernel before anything is timed: a cool card is 2 to 3 % faster
PAIRS = 4  # of turns, of the kernel and of the call with the baseline, in every round
PRECISE = "8-bit precise"
SHIPPED, HELD, REGROUPED = "as shipped", "held grouping", "warm regrouping"
ALTERNATING = ", alternating"  # end of the settings of what alternates with the kernel, the call and a regrouping call
EMPTY_QUEUE = ", empty queue"  # end of the settings of what is timed while the GPU has nothing else to do
KERNEL, CALL = ("attention_kernel", "cuda", SHIPPED), ("complete_call", "cuda", HELD)
BASELINE_CALL = ("complete_call", BASELINE, "")
SAGE_FORMATS = "sageattention2_formats (emulated)"


def main() -> int:
    options = _options()
    run = {"run": uuid.uuid4().hex[:12], **rows.environment()}
    peak = fp8_peak()
    print(f"{run['gpu']}, FP8 product 8192^3: {peak:.0f} TFLOP/s", flush=True)
    path = _path(options, run["gpu"])
    shapes = [(*map(int, shape.split("x")), HEAD_DIM) for shape in options.shapes.split(",")]
    largest = max(shapes, key=flop)
    for shape in shapes:
        made = bench_shape(shape, options, ablations=shape == largest)
        for row in made:
            row |= {"peak_tflops": peak}
            if row.get("tflops"):
                row["peak_share"] = row["tflops"] / peak
        _append(run, made, path)
    if not options.quick:
        _append(run, clustered_errors() + loud_channel_errors(), path)
    return 0


def _path(options: argparse.Namespace, gpu: str) -> Path | None:
    """Where the rows go, if anywhere."""
    folder = options.output or (None if options.quick else rows.RESULTS)
    return None if folder is None else folder / f"{rows.stem(gpu)}.jsonl"


def _append(run: dict, made: list[dict], path: Path | None) -> None:
    versions = peers.versions()
    for row in made:
        if row["implementation"] in versions:
            row["version"] = versions[row["implementation"]]
        print(summary(row), flush=True)
    if path is not None:
        rows.append([{**run, **row} for row in made], path)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="our own calls alone")
    parser.add_argument("--shapes", default=DEFAULT_SHAPES, help="BxHxS, comma separated")
    parser.add_argument("--seconds", type=float, default=0.2, help="of every variant in every round")
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

    samples = interleave([{"product": product}], rounds=2, seconds_per_call=0.5)["product"]
    return 2 * size**3 / samples.quantile(0.5) / 1e9


def flop(shape: tuple[int, int, int, int]) -> int:
    """Useful work of an attention call."""
    batch, heads, tokens, head_dim = shape
    return 4 * batch * heads * tokens**2 * head_dim


def bench_shape(shape: tuple[int, int, int, int], options: argparse.Namespace, ablations: bool) -> list[dict]:
    """Rows of one shape: our kernel, the complete call, preparation, grouping, scratch memory; peers and ablations."""
    q, k, v = normal_inputs(shape)
    grouping = group_values(v)
    expected = ReferenceRows(q, k, v)
    turns = all_turns(q, k, v, grouping, options.quick, ablations)
    variants = {key: call for turn in turns for key, call in turn.items()}
    made = []
    interleave([{KERNEL: variants[KERNEL]}], rounds=1, seconds_per_call=HEAT_SECONDS)
    timed = interleave(turns, options.rounds, options.seconds, lambda key: key[2].endswith(EMPTY_QUEUE))
    for key, samples in timed.items():
        row = timed_row(key, samples, shape, grouping)
        if row["operation"] in ("attention_kernel", "complete_call"):
            row["rel_l2"] = expected.error(variants[key]())
        made.append(row)
    made += factor_rows(timed, shape) + share_rows(made, shape)
    made.append(scratch_row(q, k, v, grouping, shape))
    if not options.quick:
        made.append(error_row("error_normal", SAGE_FORMATS, "", shape, expected.sage_formats_error()))
    return made


def all_turns(q, k, v, grouping: Grouping, quick: bool, ablations: bool) -> list[dict[tuple[str, str, str], Callable]]:
    """What is timed in a round: kernel, call and the baseline in PAIRS pairs of turns each, then everything else."""
    kernel, call, alternating, *others = our_turns(q, k, v, grouping)
    paired = [kernel, call]
    if not quick:
        found = {("complete_call", name, ""): call for name, call in peers.found(q, k, v).items()}
        if BASELINE_CALL in found:
            baseline = {BASELINE_CALL: found.pop(BASELINE_CALL)}
            paired = [kernel, baseline, call, baseline]
        others += alone(found)
        if ablations:
            beside = {NOTHING_OFF: kernel[KERNEL]}
            others += alone(named("attention_kernel", "cuda", beside | ablated(q, k, v, grouping)))
    return PAIRS * paired + PAIRS * [alternating] + others


def our_turns(q, k, v, grouping: Grouping) -> list[dict[tuple[str, str, str], Callable]]:
    """Turns of the kernel, of the call, of both and a regrouping call, and of everything else of our own."""
    complete = complete_calls(q, k, v, grouping)
    held = {HELD: complete.pop(HELD)}
    kernel = named("attention_kernel", "cuda", {SHIPPED: kernel_variant(q, k, v, grouping.permutation)})
    call = named("complete_call", "cuda", held)
    regrouped = {REGROUPED: lambda: attention(q, k, v, grouping=group_values(v, grouping))}
    alternating = ending(kernel | call | named("complete_call", "cuda", regrouped), ALTERNATING)
    parts = {
        **named("prepare", "cuda", {HELD: lambda: prepared(q, k, v, grouping.permutation)}),
        **named("regroup_extra", "cuda", {"warm": lambda: group_values(v, grouping), "cold": lambda: group_values(v)}),
    }
    others = named("complete_call", "cuda", complete) | without_nvrtc(q, k, v, grouping)
    return [kernel, call, alternating, *alone(others), parts, ending(call | parts, EMPTY_QUEUE)]


def without_nvrtc(q, k, v, grouping: Grouping) -> dict[tuple[str, str, str], Callable]:
    """The call that stands in where the CUDA kernels cannot be compiled, if this machine has it."""
    if not support(q, k, v, implementation="triton8"):
        return {}
    return {("complete_call", "triton8", HELD): lambda: attention(q, k, v, grouping=grouping, implementation="triton8")}


def named(operation: str, implementation: str, calls: dict[str, Callable]) -> dict[tuple[str, str, str], Callable]:
    """Calls by (operation, implementation, settings), from calls by settings."""
    return {(operation, implementation, settings): call for settings, call in calls.items()}


def ending(calls: dict[tuple[str, str, str], Callable], end: str) -> dict[tuple[str, str, str], Callable]:
    """The same calls with something more in their settings."""
    return {
        (operation, implementation, settings + end): call
        for (operation, implementation, settings), call in calls.items()
    }


def alone(calls: dict) -> list[dict]:
    """A turn for every call."""
    return [{key: call} for key, call in calls.items()]


def prepared(q, k, v, permutation, **switches):
    """Operands of the attention kernel."""
    return prepare(q, k, v, scale=HEAD_DIM**-0.5, permutation=permutation, **switches)


def kernel_variant(q, k, v, permutation, demean: bool = True, **switches) -> Callable[[], torch.Tensor]:
    """The attention kernel on prepared operands."""
    operands = prepared(q, k, v, permutation, demean=demean)
    output = torch.empty_like(q)

    def run() -> torch.Tensor:
        attend_cuda(operands, output, means=demean, **switches)
        return output

    return run


def ablated(q, k, v, grouping: Grouping) -> dict[str, Callable[[], torch.Tensor]]:
    """The attention kernel with one trick switched off at a time.

    The preparation rotates q and k by a symmetric orthogonal matrix, so rotated inputs leave it as they were.
    """
    return {
        "means off": kernel_variant(q, k, v, grouping.permutation, demean=False),
        "grouping off": kernel_variant(q, k, v, None),
        "expcast off": kernel_variant(q, k, v, grouping.permutation, probabilities="exp2"),
        "rotation off": kernel_variant(rotated(q), rotated(k), v, grouping.permutation),
    }


def rotated(x: torch.Tensor) -> torch.Tensor:
    """[B, H, S, D] times the Hadamard matrix of the preparation, rounded to the dtype of ``x``."""
    return (x.float() @ hadamard_matrix(x.shape[-1], device=x.device).float()).to(x.dtype)


def complete_calls(q, k, v, grouping: Grouping) -> dict[str, Callable[[], torch.Tensor]]:
    """The public call, in every 8-bit mode of this machine."""
    calls = {
        HELD: lambda: attention(q, k, v, grouping=grouping),
        "sequence order": lambda: attention(q, k, v),
    }
    if support(q, k, v, mode=PRECISE, implementation="cuda"):
        calls["precise"] = lambda: attention(q, k, v, mode=PRECISE)
    return calls


def timed_row(key: tuple[str, str, str], samples: Samples, shape, grouping: Grouping) -> dict:
    """The row of one timed variant."""
    row = dict(zip(("operation", "implementation", "settings"), key, strict=True)) | {"shape": list(shape)}
    row |= {"dtype": "bfloat16", "layout": "BSHD", "clusters": grouping.clusters, **samples.row()}
    if row["operation"] in ("attention_kernel", "complete_call"):
        row["tflops"] = flop(shape) / row["ms_p50"] / 1e9
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


def factor_rows(timed: dict[tuple[str, str, str], Samples], shape) -> list[dict]:
    """How many times as fast as the baseline kernel and call are: least, median and largest over pairs of turns."""
    if BASELINE_CALL not in timed:
        return []
    baseline, made = timed[BASELINE_CALL].medians, []  # behind a turn of the kernel, behind one of the call, and so on
    for operation, key, behind in (
        ("kernel_over_cudnn", KERNEL, baseline[::2]),
        ("call_over_cudnn", CALL, baseline[1::2]),
    ):
        factors = [theirs / ours for theirs, ours in zip(behind, timed[key].medians, strict=True)]
        row = {"operation": operation, "implementation": "cuda", "settings": key[2], "shape": list(shape)}
        spread = {"factor_least": min(factors), "factor_largest": max(factors), "turns": len(factors)}
        made.append(row | {"dtype": "bfloat16", "factor": median(factors)} | spread)
    return made


def share_rows(made: list[dict], shape) -> list[dict]:
    """What the call adds to the kernel, a regrouping to the call, and the groupings of a render to its calls."""
    times = {(row["operation"], row["settings"]): row["ms_p50"] for row in made if row["implementation"] == "cuda"}
    kernel, call = times["attention_kernel", SHIPPED + ALTERNATING], times["complete_call", HELD + ALTERNATING]
    regrouped = times["complete_call", REGROUPED + ALTERNATING]
    shares = [
        {"operation": "call_over_kernel", "settings": HELD, "share_of_kernel": call / kernel - 1},
        {"operation": "regrouping_over_call", "settings": "warm", "share_of_call": regrouped / call - 1},
    ]
    for window in WINDOWS:  # cold once, then warm while the window lasts
        groupings = len(range(0, round(SCHEDULE_STEPS * window), REFRESH_INTERVAL))
        spent = times["regroup_extra", "cold"] + (groupings - 1) * times["regroup_extra", "warm"]
        settings = f"{SCHEDULE_STEPS} steps, window {window}, interval {REFRESH_INTERVAL}"
        share = spent / SCHEDULE_STEPS / call
        shares.append({"operation": "grouping_average", "settings": settings, "share_of_call": share})
    return [{"implementation": "cuda", "shape": list(shape), "dtype": "bfloat16", **row} for row in shares]


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
        "settings": HELD,
        "shape": list(shape),
        "dtype": "bfloat16",
        "bytes": peak,
        "share_of_8bit_tensors": peak / eight_bit,
    }


def clustered_errors() -> list[dict]:
    """Errors on values that cluster and have outlier tokens, as a video layer's do (vc_attention.testing)."""
    q, k, v = clustered_qkv(CLUSTERED_GRID, heads=2, dtype=torch.bfloat16, device="cuda")
    expected, grouping = ReferenceRows(q, k, v), group_values(v)
    calls = {
        **shipped_and_ablated(q, k, v, grouping),
        **{("cuda", name): call for name, call in complete_calls(q, k, v, grouping).items()},
        **{(name, ""): call for name, call in peers.found(q, k, v).items()},
    }
    errors = {key: expected.error(call()) for key, call in calls.items()}
    errors[SAGE_FORMATS, ""] = expected.sage_formats_error()
    return [error_row("error_clustered", *key, q.shape, error) for key, error in errors.items()]


def loud_channel_errors() -> list[dict]:
    """Errors where one channel of k is LOUD_CHANNEL times as large as the others: what the rotation is for."""
    q, k, v = normal_inputs((1, 2, math.prod(CLUSTERED_GRID), HEAD_DIM))
    k[..., 0] *= LOUD_CHANNEL
    expected, grouping = ReferenceRows(q, k, v), group_values(v)
    calls = shipped_and_ablated(q, k, v, grouping)
    return [error_row("error_loud_channel", *key, q.shape, expected.error(call())) for key, call in calls.items()]


def shipped_and_ablated(q, k, v, grouping: Grouping) -> dict[tuple[str, str], Callable[[], torch.Tensor]]:
    """The kernel with all tricks and with one switched off, by implementation and settings of an error row."""
    calls = {SHIPPED: kernel_variant(q, k, v, grouping.permutation), **ablated(q, k, v, grouping)}
    return {("cuda", f"kernel, {name}"): call for name, call in calls.items()}


def summary(row: dict) -> str:
    """One line for a person."""
    parts = [f"{row['operation']:17s} {row['implementation']:18s} {row['settings']:33s} {row['shape']}"]
    for name, text in (
        ("ms_p50", "{:.3f} ms"),
        ("tflops", "{:.0f} TFLOP/s"),
        ("rel_l2", "error {:.4f}"),
        ("watts", "{:.0f} W"),
        ("factor", "{:.3f} times as fast"),
        ("share_of_kernel", "{:.2%} of the kernel"),
        ("share_of_call", "{:.2%} of the call"),
        ("share_of_8bit_tensors", "{:.3f} of the 8-bit tensors"),
    ):
        if row.get(name) is not None:
            parts.append(text.format(row[name]))
    return "  ".join(parts)


if __name__ == "__main__":
    sys.exit(main())
