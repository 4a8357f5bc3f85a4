"""Small calls of every kernel, for compute-sanitizer: ``python sanitized_calls.py cuda`` or another name of CALLS.

They launch as little as possible of torch's own on the GPU, and end by printing "finished".
"""

import ctypes
import dataclasses
import sys

import torch

D = 128
SCALE = 0.1
LENGTHS = ((1, 1), (129, 300), (200, 2300))  # of queries and of keys: no whole tile, the last one short


def inputs(q_tokens, tokens):
    """bf16 q, k, v [1, 2, S, D]."""
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(1, 2, length, D, generator=generator).bfloat16().cuda() for length in (q_tokens, tokens, tokens)
    ]


def unwritten(q):
    return torch.full(q.shape, float("nan"), dtype=q.dtype).cuda()


def check(out):
    torch.cuda.synchronize()
    assert out.cpu().isfinite().all()


def cuda():
    """Grouping cold and warm, the 8-bit kernel with both kinds of probabilities, and the precise one."""
    from vc_attention.attend.cuda import attend_cuda
    from vc_attention.attend.precise_cuda import attend_precise_cuda
    from vc_attention.group.cuda import group_cuda
    from vc_attention.quantize.cuda import prepare, prepare_precise

    for q_tokens, tokens in LENGTHS:
        q, k, v = inputs(q_tokens, tokens)
        cold, _ = group_cuda(v, None, min(5, tokens), 1)
        warm, _ = group_cuda(v, v[:, :, : min(300, tokens)].float(), min(300, tokens), 1)  # 300 clusters: assign_wide
        for order, probabilities in ((cold, "expcast"), (warm, "exp2")):
            out = unwritten(q)
            attend_cuda(prepare(q, k, v, scale=SCALE, permutation=order), out, probabilities=probabilities)
            check(out)
        out = unwritten(q)
        attend_precise_cuda(prepare_precise(q, k, v, scale=SCALE), out)
        check(out)


def cuda_planted():
    """More query rows than ``out`` has."""
    from vc_attention.attend import cuda as host
    from vc_attention.attend.tile_schedule import split
    from vc_attention.quantize.cuda import prepare

    q, k, v = inputs(200, 2300)
    out = unwritten(q)
    pointers_and_sizes = host.pointers_and_sizes

    def one_size_wrong(*arguments):
        made = pointers_and_sizes(*arguments)
        made[-4] = ctypes.c_int(256)
        return made

    host.pointers_and_sizes = one_size_wrong
    host.attend_cuda(prepare(q, k, v, scale=SCALE), out, schedule=split(2, 200, 2300, 0, 0))
    torch.cuda.synchronize()


def triton():
    """Grouping cold and warm, and the 8-bit kernels."""
    from vc_attention.attend.triton8 import attend_triton8
    from vc_attention.group.triton import group_triton
    from vc_attention.quantize.triton8 import prepare8

    for q_tokens, tokens in LENGTHS:
        q, k, v = inputs(q_tokens, tokens)
        _, centroids = group_triton(v, None, min(5, tokens), 1)
        order, _ = group_triton(v, centroids, min(5, tokens), 1)
        out = unwritten(q)
        attend_triton8(prepare8(q, k, v, scale=SCALE, permutation=order), out, "expcast")
        check(out)


def triton_planted():
    """Fewer query rows than ``out`` wants."""
    from vc_attention.attend.triton8 import attend_triton8
    from vc_attention.quantize.triton8 import prepare8

    q, k, v = inputs(200, 300)
    operands = prepare8(q, k, v, scale=SCALE)
    attend_triton8(dataclasses.replace(operands, q=operands.q[:, :, :1].clone()), unwritten(q), "expcast")
    torch.cuda.synchronize()


CALLS = {"cuda": cuda, "cuda planted": cuda_planted, "triton": triton, "triton planted": triton_planted}

if __name__ == "__main__":
    CALLS[sys.argv[1]]()
    print("finished")
