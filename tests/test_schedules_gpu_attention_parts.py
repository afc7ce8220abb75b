"""Attention in two halves: the definitions, and the GPU's kernels, against the numpy twin.

The tests marked `gpu` need TVM's runtime alone where `--kernels` names a library.
"""

import gpu_kernels
import numpy as np
import pytest
from gpu_kernels import ATTENTIONS, MASKED_WIDTHS, SLOTS, kernel, normal
from test_schedules_gpu import attention_inputs, words_of

from bitmtp_tvm import reference

# As relax_models.attention_ops has them: a machine that runs kernels need not have the compiler.
CHAINS, CHAIN_SLOTS = 32, 32
ARCHES = ("sm_86", "sm_87", "sm_90a")
REAL = [
    item
    for shape in [(20, 5, 128), (16, 8, 128), (8, 2, 64)]
    for width in (1, 8, 64)
    for item in (
        kernel("attention_parts", *shape, 4200, width=width),
        kernel("attention_join", shape[0], shape[2], width=width),
    )
]


def test_the_chains_of_these_tests_are_the_operation_s():
    from relax_models import attention_ops

    assert (attention_ops.CHAINS, attention_ops.CHAIN_SLOTS) == (CHAINS, CHAIN_SLOTS)


@pytest.mark.parametrize("boundary", [0, 31, 1100])
def test_the_definitions_make_up_attention(rng, boundary):
    """With more slots than the chains have in one turn; what nobody has written is no number."""
    import cpu_kernels

    from relax_models import attention_ops

    heads, kv_heads, head_dim, slots, width = 4, 2, 6, 1200, 3
    cache = normal(rng, 2, kv_heads, slots, head_dim).astype(np.float16)
    cache[:, :, boundary + width :] = np.nan
    q = normal(rng, width, heads, head_dim)
    seen = np.array([[1, 0, 0], [1, 1, 0], [1, 0, 1]], bool)

    def call(name, arguments, width):
        item = kernel(name, *arguments, width=width)
        return cpu_kernels.build(gpu_kernels.definition(item))["main"]

    import tvm

    def run(func, arrays):
        tensors = [tvm.runtime.tensor(array) for array in arrays]
        func(*tensors)
        return [tensor.numpy() for tensor in tensors]

    made = parts_of(width, heads, head_dim)
    func = call("attention_parts", (heads, kv_heads, head_dim, slots), width)
    at = np.array([boundary], np.int32)
    *_, tops, norms, mixed = run(func, [q, cache, at, words_of(seen), *made])
    assert attention_ops.CHAINS == tops.shape[2]
    func = call("attention_join", (heads, head_dim), width)
    *_, got = run(func, [tops, norms, mixed, at, np.zeros((width, heads * head_dim), np.float32)])
    want = reference.attention(q, *cache.astype(np.float32), boundary, seen)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("arch", ARCHES)
def test_kernels_compile_without_spills(arch):
    from bitmtp_tvm.cubin import find_cubins
    from bitmtp_tvm.nvrtc import compile_cubin

    source = gpu_kernels.cuda_text(REAL, gpu_kernels.target_for("sm_86"))
    cubin, _ = compile_cubin(source, arch)
    (found,) = find_cubins(cubin)
    assert len(found.kernels) == len(REAL)
    assert {k.name: k.stack_bytes for k in found.kernels if k.stack_bytes} == {}


def parts_of(width, heads, head_dim):
    """Partial sums that nobody has written."""
    shapes = (width, heads, CHAINS), (width, heads, CHAINS), (width, heads, CHAINS, head_dim)
    return [np.full(shape, np.nan, np.float32) for shape in shapes]


def attend(kernels, shape, q, cache, boundary, seen):
    (heads, _, head_dim), width = shape, len(q)
    at = np.array([boundary], np.int32)
    item = kernel("attention_parts", *shape, SLOTS, width=width)
    arguments = [q, cache, at, words_of(seen), *parts_of(width, heads, head_dim)]
    parts = kernels.run(item, arguments)[-3:]
    item = kernel("attention_join", heads, head_dim, width=width)
    out = np.full((width, heads * head_dim), np.nan, np.float32)
    return kernels.run(item, [*parts, at, out])[-1]


@pytest.mark.gpu
@pytest.mark.parametrize("boundary", [0, 31, 300, 570])
@pytest.mark.parametrize("width", MASKED_WIDTHS)
@pytest.mark.parametrize("shape", ATTENTIONS)
def test_both_halves_make_up_attention(kernels, rng, shape, width, boundary):
    q, cache = attention_inputs(rng, shape, width, boundary)
    seen = (rng.random((width, width)) < 0.4) | np.eye(width, dtype=bool)
    got = attend(kernels, shape, q, cache, boundary, seen)
    want = reference.attention(q, *cache.astype(np.float32), boundary, seen)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("boundary", [0, 31, 570])
@pytest.mark.parametrize("shape", ATTENTIONS)
def test_a_row_gets_the_same_bits_in_every_step(kernels, rng, shape, boundary):
    """As one of 64 rows, of 8, and alone, at its own slot."""
    q, cache = attention_inputs(rng, shape, 64, boundary)
    causal = np.tri(64, dtype=bool)
    want = attend(kernels, shape, q, cache, boundary, causal)
    for i in (0, 7, 31, 63):
        alone = attend(kernels, shape, q[i : i + 1], cache, boundary + i, causal[:1, :1])
        assert np.array_equal(alone[0], want[i])
    some = attend(kernels, shape, q[16:24], cache, boundary + 16, causal[:8, :8])
    assert np.array_equal(some, want[16:24])
