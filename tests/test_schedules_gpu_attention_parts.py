"""Attention in two halves: the definitions, and the GPU's kernels, against the numpy twin.

The tests marked `gpu` need TVM's runtime alone where `--kernels` names a library.
"""

import gpu_kernels
import numpy as np
import pytest
from gpu_kernels import (
    ATTENTIONS,
    CAUSAL_WIDTHS,
    CHAIN_SLOTS,
    CHAINS,
    LONG_ATTENTION,
    LONG_SLOTS,
    LONG_WIDTHS,
    MASKED_WIDTHS,
    SLOTS,
    kernel,
    normal,
)
from test_schedules_gpu import attention_inputs, words_of

from bitmtp_tvm import reference

ARCHES = ("sm_86", "sm_87", "sm_90a")
# Heads that tensor cores serve, and such that they do not.
MMA = [shape for shape in ATTENTIONS if shape[2] % 64 == 0]
REAL = [
    kernel("attention_parts", 20, 5, 128, 4200, width=1),
    kernel("attention_parts", 10, 2, 64, 4200, width=64),
    kernel("attention_parts", 6, 2, 80, 4200, width=8),
    kernel("attention_join", 20, 128, width=64),
    kernel("attention_join", 8, 64, width=1),
]
# Made with their largest tiles.
TILED = [
    kernel("attention_parts", 16, 8, 128, 4200, width=64),
    kernel("attention", 20, 5, 128, 4200, True, width=512),
    # Groups of heads that are no power of two.
    kernel("attention_parts", 10, 2, 64, 4200, width=64),
    kernel("attention", 10, 2, 64, 4200, True, width=128),
    kernel("attention", 24, 8, 128, 4200, True, width=128),
]


def test_the_chains_of_these_tests_are_the_operation_s():
    from relax_models import attention_ops

    assert (attention_ops.CHAINS, attention_ops.CHAIN_SLOTS) == (CHAINS, CHAIN_SLOTS)


@pytest.mark.parametrize("boundary", [0, 31, 2100])
def test_the_definitions_make_up_attention(rng, boundary):
    """With more slots than the chains have in one turn; what nobody has written is no number."""
    import cpu_kernels

    from relax_models import attention_ops

    heads, kv_heads, head_dim, slots, width = 4, 2, 6, 2200, 3
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


def tiled(item):
    """A kernel with the largest tiles that may be chosen for it, under names of their own."""
    from bitmtp_tvm.targets import tvm_target
    from schedules import gpu
    from schedules.space import LARGE_CARD, choices
    from schedules.workload import read, scheduled

    func, target = gpu_kernels.definition(item), tvm_target(gpu_kernels.target_for("sm_86"))
    work = read(func)
    found = choices(gpu.TEMPLATES[item.op][:1], work, LARGE_CARD)
    most = max(choice.tile.pairs for choice in found)
    # One for each way to make the scores: how often a block does it makes no other registers.
    large = {choice.tile.at_once: choice for choice in found if choice.tile.pairs == most}
    for at_once, choice in large.items():
        name = f"{item.name}_{at_once}"
        made = scheduled(choice.template.make(work, choice.tile, target), func)
        yield name, made.with_attr("global_symbol", name)


def test_heads_of_whole_fragments_run_on_tensor_cores():
    from schedules import gpu
    from schedules.space import LARGE_CARD, ruled
    from schedules.workload import read

    items = [gpu_kernels.attention(*shape, True, 9) for shape in ATTENTIONS]
    items += [kernel("attention_parts", *shape, SLOTS, width=3) for shape in ATTENTIONS]
    items.append(gpu_kernels.attention(8, 2, 256, True, 9))
    for item in items:
        work = read(gpu_kernels.definition(item))
        name = ruled(gpu.TEMPLATES[item.op], work, LARGE_CARD).template.name
        assert name.endswith("_mma") == (work.shapes[0][2] in (64, 128))


@pytest.fixture(scope="module")
def source():
    """The CUDA text of kernels at the shapes of the real models, and with their largest tiles."""
    made = dict(pair for item in TILED for pair in tiled(item))
    target = gpu_kernels.target_for("sm_86")
    return gpu_kernels.cuda_text(REAL, target, made), len(REAL) + len(made)


@pytest.mark.parametrize("arch", ARCHES)
def test_kernels_compile_without_spills(source, arch):
    from bitmtp_tvm.cubin import find_cubins
    from bitmtp_tvm.nvrtc import compile_cubin

    text, number = source
    cubin, _ = compile_cubin(text, arch)
    (found,) = find_cubins(cubin)
    assert len(found.kernels) == number
    assert {k.name: k.stack_bytes for k in found.kernels if k.stack_bytes} == {}
    assert max(k.shared_bytes for k in found.kernels) <= 48 * 1024


def parts_of(width, heads, head_dim):
    """Partial sums that nobody has written."""
    shapes = (width, heads, CHAINS), (width, heads, CHAINS), (width, heads, CHAINS, head_dim)
    return [np.full(shape, np.nan, np.float32) for shape in shapes]


def attend(kernels, shape, q, cache, boundary, seen):
    (heads, _, head_dim), width = shape, len(q)
    at = np.array([boundary], np.int32)
    item = kernel("attention_parts", *shape, cache.shape[2], width=width)
    arguments = [q, cache, at, words_of(seen), *parts_of(width, heads, head_dim)]
    parts = kernels.run(item, arguments)[-3:]
    item = kernel("attention_join", heads, head_dim, width=width)
    out = np.full((width, heads * head_dim), np.nan, np.float32)
    return kernels.run(item, [*parts, at, out])[-1]


def attend_whole(kernels, shape, q, cache, boundary):
    """The rows as a prefill chunk has them, in one kernel."""
    heads, _, head_dim = shape
    item = kernel("attention", *shape, cache.shape[2], True, width=len(q))
    at, out = np.array([boundary], np.int32), np.full((len(q), heads * head_dim), np.nan, "f4")
    return kernels.run(item, [q, cache, at, out])[-1]


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


@pytest.mark.gpu
@pytest.mark.parametrize("boundary", [0, 31, 550])
@pytest.mark.parametrize("shape", MMA)
def test_prefill_gives_a_row_the_bits_of_a_step(kernels, rng, shape, boundary):
    width = CAUSAL_WIDTHS[-1]
    q, cache = attention_inputs(rng, shape, width, boundary)
    chunk = attend_whole(kernels, shape, q, cache, boundary)
    for first in (0, 40, width - 64):
        causal = np.tri(64, dtype=bool)
        step = attend(kernels, shape, q[first : first + 64], cache, boundary + first, causal)
        assert np.array_equal(step, chunk[first : first + 64])


@pytest.mark.gpu
@pytest.mark.parametrize("boundary", [2047, 2048, 4200])
def test_a_long_cache_has_several_turns(kernels, rng, boundary):
    """Against the numpy twin; and the same bits alone, among eight, and in a prefill chunk."""
    (heads, kv_heads, head_dim), width = LONG_ATTENTION, LONG_WIDTHS[-1]
    cache = normal(rng, 2, kv_heads, LONG_SLOTS, head_dim).astype(np.float16)
    cache[:, :, boundary + width :] = np.nan
    q, causal = normal(rng, width, heads, head_dim) * 2, np.tri(width, dtype=bool)
    got = attend(kernels, LONG_ATTENTION, q, cache, boundary, causal)
    want = reference.attention(q, *cache.astype(np.float32), boundary, causal)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
    assert np.array_equal(attend_whole(kernels, LONG_ATTENTION, q, cache, boundary), got)
    alone = attend(kernels, LONG_ATTENTION, q[-1:], cache, boundary + width - 1, causal[:1, :1])
    assert np.array_equal(alone[0], got[-1])


@pytest.mark.gpu
@pytest.mark.parametrize("broken", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("shape", MMA)
def test_a_value_that_is_no_number_is_of_those_alone_who_see_it(kernels, rng, shape, broken):
    """Whose keys are fine: nothing but the value tells."""
    width, bad, boundary = 8, 5, 60
    q, cache = attention_inputs(rng, shape, width, boundary)
    seen = np.tri(width, dtype=bool)
    want = attend(kernels, shape, q, cache, boundary, seen)
    cache[1, :, boundary + bad, 3::16] = broken
    got = attend(kernels, shape, q, cache, boundary, seen)
    assert np.array_equal(got[:bad], want[:bad])
    lost = ~np.isfinite(got[bad:].reshape(width - bad, shape[0], shape[2]))
    assert lost[..., 3::16].all()
