"""Attention that turns its queries and writes the cache itself: the bits of two kernels.

The tests marked `gpu` need TVM's runtime alone where `--kernels` names a library.
"""

import gpu_kernels
import numpy as np
import pytest
from gpu_kernels import (
    CHAIN_SLOTS,
    CHAINS,
    LONG_SLOTS,
    POSITIONS,
    ROPE_ATTENTIONS,
    ROPE_WIDTHS,
    kernel,
    normal,
)
from test_schedules_gpu import words_of
from test_schedules_gpu_attention_parts import parts_of

ARCHES = ("sm_86", "sm_87", "sm_90a")
REAL = [
    kernel("rope_attention_parts", 20, 5, 128, 4096, 4224, width=1),
    kernel("rope_attention_parts", 10, 2, 64, 2048, 2176, width=2),
]


@pytest.mark.parametrize("arch", ARCHES)
def test_kernels_compile_without_spills(arch):
    from bitmtp_tvm.cubin import find_cubins
    from bitmtp_tvm.nvrtc import compile_cubin

    # As it is built for the card: others begin while the kernel before still runs.
    text = gpu_kernels.cuda_text(REAL, gpu_kernels.target_for(arch))
    cubin, _ = compile_cubin(text, arch)
    (found,) = find_cubins(cubin)
    assert len(found.kernels) == len(REAL)
    assert {k.name: k.stack_bytes for k in found.kernels if k.stack_bytes} == {}


def inputs(rng, shape, width, boundary):
    """qkv, positions, boundary, table and a cache without numbers behind it."""
    heads, kv_heads, head_dim = shape
    qkv = normal(rng, width, (heads + 2 * kv_heads) * head_dim) * 2
    position = rng.integers(0, POSITIONS, width).astype(np.int32)
    table = normal(rng, POSITIONS, head_dim // 2, 2)
    cache = normal(rng, 2, kv_heads, LONG_SLOTS, head_dim).astype(np.float16)
    cache[:, :, boundary:] = np.nan
    return [qkv, position, np.array([boundary], np.int32), table, cache]


def both(kernels, shape, arguments, seen):
    """Cache, tops, norms and mixed of one kernel, and of the two that it stands for."""
    (heads, _, head_dim), width = shape, len(seen)
    sizes, parts = (*shape, POSITIONS, LONG_SLOTS), parts_of(width, heads, head_dim)
    item = kernel("rope_attention_parts", *sizes, width=width)
    *_, cache, _, tops, norms, mixed = kernels.run(item, [*arguments, words_of(seen), *parts])
    item = kernel("rope_kv_write", *sizes, width=width)
    q = gpu_kernels.nothing(width, heads, head_dim)
    *_, written, q = kernels.run(item, [*arguments, q])
    item = kernel("attention_parts", *shape, LONG_SLOTS, width=width)
    two = kernels.run(item, [q, written, arguments[2], words_of(seen), *parts])[-3:]
    return [cache, tops, norms, mixed], [written, *two]


@pytest.mark.gpu
@pytest.mark.parametrize("boundary", [0, 60, 63, 64, 65, 2047, 2048, 4250])
@pytest.mark.parametrize("width", ROPE_WIDTHS)
@pytest.mark.parametrize("shape", ROPE_ATTENTIONS)
def test_one_kernel_gives_the_bits_of_two(kernels, rng, shape, width, boundary):
    arguments = inputs(rng, shape, width, boundary)
    seen = (rng.random((width, width)) < 0.4) | np.eye(width, dtype=bool)
    one, two = both(kernels, shape, arguments, seen)
    for got, want in zip(one, two, strict=True):
        assert got.tobytes() == want.tobytes()
    used = min(CHAINS, -(-(boundary + width) // CHAIN_SLOTS))
    assert all(np.isfinite(part[:, :, :used]).all() for part in one[1:])
    assert np.isfinite(one[0][:, :, : boundary + width]).all()


@pytest.mark.gpu
@pytest.mark.parametrize("width", ROPE_WIDTHS)
@pytest.mark.parametrize("shape", ROPE_ATTENTIONS)
def test_a_value_that_is_no_number_does_what_it_did(kernels, rng, shape, width):
    heads, kv_heads, head_dim = shape
    arguments = inputs(rng, shape, width, 61)
    arguments[0][width // 2, (heads + kv_heads) * head_dim :: 3] = np.inf
    one, two = both(kernels, shape, arguments, np.tri(width, dtype=bool))
    for got, want in zip(one, two, strict=True):
        assert np.array_equal(got, want, equal_nan=True)
