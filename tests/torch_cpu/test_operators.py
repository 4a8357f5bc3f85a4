"""The torch operators: opcheck, torch.compile without graph breaks, fakes that tell the truth, registration once."""

import subprocess
import sys

import pytest
import torch
from vc_attention import attention, group_values, ops
from vc_attention.errors import UnsupportedCall
from vc_attention.testing import random_qkv

SETTINGS = ("8-bit", "int8", "expcast", True, True, "reference")


def permutation_of(v):
    return group_values(v).permutation


def attention_arguments(
    shape=(1, 2, 40, 16), layout="BHSD", dtype=torch.float32, settings=SETTINGS, keys=None, grouped=False
):
    q, k, v = random_qkv(shape, dtype=dtype)
    if keys is not None:
        k, v = k[:, :, :keys], v[:, :, :keys]
    permutation = permutation_of(v) if grouped else None
    if layout == "BSHD":
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return (q, k, v, permutation, 0.25, layout, *settings)


ATTENTION_CASES = {
    "plain": attention_arguments(),
    "grouped": attention_arguments((2, 3, 140, 16), grouped=True),
    "bf16, other key length": attention_arguments(dtype=torch.bfloat16, keys=17),
    "fp16, BSHD views": attention_arguments((2, 3, 33, 16), "BSHD", torch.float16),
    "one token, BSHD": attention_arguments((1, 3, 1, 16), "BSHD"),
    "one head, BSHD": attention_arguments((2, 1, 5, 16), "BSHD"),
    "4-bit": attention_arguments(settings=("4-bit", "nvfp4", "exp2", True, True, "reference")),
    "4-bit, own block": attention_arguments(
        (1, 2, 150, 16), dtype=torch.bfloat16, settings=("4-bit", "nvfp4", "exp2", True, True, "reference")
    ),
    "e4m3, no means": attention_arguments(settings=("8-bit", "e4m3", "exp2", False, True, "reference")),
    "auto settings, grouped": attention_arguments(
        settings=("auto", "auto", "auto", True, True, "reference"), grouped=True
    ),
}


def group_arguments(shape=(1, 2, 40, 16), layout="BHSD", dtype=torch.float32, clusters=3, warm=False, iterations=2):
    v = random_qkv(shape, dtype=dtype)[2]
    centroids = group_values(v, clusters=clusters).centroids if warm else None
    return (v.transpose(1, 2) if layout == "BSHD" else v, centroids, clusters, iterations, layout, "auto")


GROUP_CASES = {
    "cold": group_arguments(),
    "warm": group_arguments((2, 3, 50, 16), warm=True),
    "warm, no iterations": group_arguments((1, 2, 50, 16), warm=True, iterations=0),
    "bf16, BSHD view": group_arguments((2, 3, 50, 16), "BSHD", torch.bfloat16),
    "one token": group_arguments((1, 1, 1, 16), clusters=1),
    "as many clusters as tokens": group_arguments((1, 2, 6, 16), clusters=6),
}


@pytest.mark.parametrize("case", list(ATTENTION_CASES))
def test_opcheck_attention(case):
    torch.library.opcheck(ops.attention_operator, ATTENTION_CASES[case])


@pytest.mark.parametrize("case", list(GROUP_CASES))
def test_opcheck_group_values(case):
    torch.library.opcheck(ops.group_operator, GROUP_CASES[case])


def facts(x: torch.Tensor):
    return x.shape, x.stride(), x.dtype, x.storage_offset()


@pytest.mark.parametrize("case", list(ATTENTION_CASES))
def test_fake_attention_is_as_the_real(case):
    arguments = ATTENTION_CASES[case]
    real = ops.attention_operator(*arguments)
    fake = ops.attention_operator(*(x.to("meta") if isinstance(x, torch.Tensor) else x for x in arguments))
    assert facts(fake) == facts(real)
    assert facts(fake) == facts(torch.empty(real.shape, dtype=real.dtype))  # contiguous to the last stride


@pytest.mark.parametrize("case", list(GROUP_CASES))
def test_fake_grouping_is_as_the_real(case):
    arguments = GROUP_CASES[case]
    real = ops.group_operator(*arguments)
    fake = ops.group_operator(*(x.to("meta") if isinstance(x, torch.Tensor) else x for x in arguments))
    assert [facts(x) for x in fake] == [facts(x) for x in real]


def test_outputs_are_memory_of_their_own():
    arguments = GROUP_CASES["warm, no iterations"]
    _, centroids = ops.group_operator(*arguments)
    assert centroids.data_ptr() != arguments[1].data_ptr()
    q, k, v = random_qkv((1, 1, 1, 16))
    assert attention(q, k, v, implementation="reference").data_ptr() not in (q.data_ptr(), k.data_ptr(), v.data_ptr())


def test_a_gradient_is_refused_by_name_instead_of_being_zero():
    q, k, v = random_qkv((1, 1, 5, 16))
    output = attention(q.requires_grad_(), k, v, implementation="reference")
    with pytest.raises(RuntimeError, match=rf"{ops.NAMESPACE}\.attention"):
        output.sum().backward()


def test_operators_have_a_versioned_namespace_and_register_once():
    assert ops.NAMESPACE.startswith("vc_attention_")
    before = getattr(torch.ops, ops.NAMESPACE).attention.default
    assert before is ops.attention_operator
    assert before.name() == f"{ops.NAMESPACE}::attention"

    def never(*args):
        raise AssertionError("a second copy's function replaced the first's")

    ops._register("attention", ops.ATTENTION_SCHEMA, never, never)  # a second copy does this
    assert getattr(torch.ops, ops.NAMESPACE).attention.default is before
    before(*ATTENTION_CASES["plain"])


# torch.compile


def block(q, k, v, scale=None, layout="BHSD"):
    return attention(q * 2, k, v, scale=scale, layout=layout, implementation="reference") + 1


def grouped_block(q, k, v):
    grouping = group_values(v, clusters=3)
    return attention(q, k, v, grouping=grouping, implementation="reference", mode="4-bit") * 2


@pytest.fixture
def compiled():
    """torch.compile without graph breaks, forgotten after the test."""
    torch._dynamo.reset()
    yield lambda function, backend, **how: torch.compile(function, fullgraph=True, backend=backend, **how)
    torch._dynamo.reset()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("function", [block, grouped_block])
def test_compiled_without_graph_breaks_is_the_eager_result(compiled, backend, function):
    q, k, v = random_qkv((1, 2, 50, 16))
    torch.testing.assert_close(compiled(function, backend)(q, k, v), function(q, k, v), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("head_dim", [32, 64, 96, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_compiled_with_transposed_views_and_a_scale(compiled, head_dim, dtype):
    # B082.
    q, k, v = (x.transpose(1, 2) for x in random_qkv((2, 30, 2, head_dim), dtype=dtype))
    output = compiled(block, "aot_eager")(q, k, v, 0.1)
    expected = block(q, k, v, 0.1)
    assert output.stride() == expected.stride()
    torch.testing.assert_close(output, expected)


@pytest.mark.parametrize("shape", [(2, 5, 1, 16), (1, 1, 3, 16), (2, 4, 3, 16)])
def test_compiled_bshd(compiled, shape):
    q, k, v = random_qkv(shape)
    output = compiled(block, "aot_eager")(q, k, v, 0.25, "BSHD")
    expected = block(q, k, v, 0.25, "BSHD")
    assert output.stride() == expected.stride()
    torch.testing.assert_close(output, expected)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_dynamic_lengths_compile_at_most_twice(compiled, backend):
    # Users change resolution all day.
    graphs = []

    def counting(module, inputs):
        graphs.append(module)
        return torch._dynamo.lookup_backend(backend)(module, inputs)

    run = compiled(grouped_block, counting, dynamic=True)
    for tokens in (40, 63, 129, 200, 257):
        q, k, v = random_qkv((1, 2, tokens, 16))
        torch.testing.assert_close(run(q, k, v), grouped_block(q, k, v), rtol=1e-6, atol=1e-6)
    assert len(graphs) <= 2


def test_an_unsupported_call_comes_through_a_compiled_graph(compiled):
    q, k, v = random_qkv((1, 2, 50, 16))
    v[0, 0, 0, 0] = torch.nan
    run = compiled(block, "aot_eager")
    with pytest.raises(UnsupportedCall, match="v holds NaN"):
        run(q, k, v)


def test_inference_mode_and_compile_together(compiled):
    q, k, v = random_qkv((1, 2, 50, 16))
    with torch.inference_mode():
        torch.testing.assert_close(compiled(block, "aot_eager")(q, k, v), block(q, k, v), rtol=1e-6, atol=1e-6)


# Fresh processes: what happens at the first call


def run_python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_the_first_call_of_a_process_may_be_a_compiled_one():
    code = """
import torch, vc_attention
def block(q, k, v):
    return vc_attention.attention(q, k, v, grouping=vc_attention.group_values(v), implementation="reference") * 2
q = torch.randn(1, 1, 40, 16)
print(torch.compile(block, fullgraph=True, backend="aot_eager")(q, q, q).shape)
"""
    assert "[1, 1, 40, 16]" in run_python(code)


def test_the_first_calls_of_a_process_may_come_from_several_threads():
    # ComfyUI's multi-GPU runs one thread per device. The registration is slowed down so that the threads meet in it.
    code = """
import threading, time
import torch, vc_attention
define = torch.library.Library.define
def slow_define(library, *args, **kwargs):
    pause = 0.2 if library.ns.startswith("vc_attention") else 0.0
    time.sleep(pause)
    defined = define(library, *args, **kwargs)
    time.sleep(pause)
    return defined
torch.library.Library.define = slow_define
q = torch.randn(1, 1, 40, 16)
errors = []
def call(delay):
    time.sleep(delay)
    try:
        vc_attention.attention(q, q, q, implementation="reference")
        vc_attention.group_values(q)
    except Exception as error:
        errors.append(f"{type(error).__name__}: {str(error)[:150]}")
threads = [threading.Thread(target=call, args=(delay,)) for delay in (0.0, 0.1, 0.3, 0.5)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
print(errors)
"""
    assert run_python(code).strip() == "[]"
