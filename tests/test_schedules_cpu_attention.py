"""The processor's attention: against the numpy twin, and a row's bits whatever runs beside it."""

from functools import cache as kept

import numpy as np
import pytest
import tvm
from cpu_kernels import build, scheduled
from gpu_kernels import normal

from bitmtp_tvm import reference
from relax_models import attention_ops
from schedules.cpu.attention import heads_for

WIDTHS = (1, 2, 3, 4, 5, 8, 16)
# Heads, those of keys, and their size: alone, two or four that share a pass; 300 slots end within a
# block of eight.
SHAPES = [(10, 2, 64), (16, 8, 128), (32, 4, 12), (8, 8, 30)]
SLOTS = 300


def filled(rng, kv_heads, head_dim):
    return normal(rng, 2, kv_heads, SLOTS, head_dim).astype(np.float16)


def words(seen):
    """What a step is told of `seen` `(width, width)`: `(width, 2)` uint32."""
    bits = np.zeros((len(seen), 64), bool)
    bits[:, : len(seen)] = seen
    return np.packbits(bits, axis=1, bitorder="little").view(np.uint32)


@kept
def kernel(heads, kv_heads, head_dim, causal, width):
    func = attention_ops.attention(heads, kv_heads, head_dim, SLOTS, causal)
    return build(scheduled(func, width=width))["main"]


def attended(q, cache, boundary, seen=None):
    """A step that sees `seen` of itself, causal without."""
    width, heads, head_dim = q.shape
    inputs = [q, cache, np.array([boundary], np.int32), *([] if seen is None else [words(seen)])]
    out = tvm.runtime.tensor(np.full((width, heads * head_dim), np.nan, np.float32))
    attend = kernel(heads, cache.shape[1], head_dim, seen is None, width)
    attend(*(tvm.runtime.tensor(np.ascontiguousarray(array)) for array in inputs), out)
    return out.numpy()


@pytest.mark.parametrize("head_dim", [12, 16, 64, 128])
@pytest.mark.parametrize("boundary", [0, 1, 37, 250])
@pytest.mark.parametrize("causal", [False, True])
def test_attention(rng, head_dim, boundary, causal):
    heads, kv_heads, width = 6, 2, 16
    q, cache = normal(rng, width, heads, head_dim), filled(rng, kv_heads, head_dim)
    # What lies behind the rows of this step must not be looked at.
    cache[:, :, boundary + width :] = np.nan
    seen = np.tri(width, dtype=bool) if causal else rng.random((width, width)) < 0.5
    seen |= np.eye(width, dtype=bool)
    got = attended(q, cache, boundary, None if causal else seen)
    keys, values = cache.astype(np.float32)
    want = reference.attention(q, keys, values, boundary, seen)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


def test_attention_of_64_rows_reads_both_words(rng):
    q, cache = normal(rng, 64, 2, 16), filled(rng, 1, 16)
    seen = (rng.random((64, 64)) < 0.3) | np.eye(64, dtype=bool)
    want = reference.attention(q, *cache.astype(np.float32), 9, seen)
    np.testing.assert_allclose(attended(q, cache, 9, seen), want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), SHAPES)
@pytest.mark.parametrize("boundary", [0, 5, 50, 255, 284])
def test_a_row_is_the_same_in_every_width(rng, heads, kv_heads, head_dim, boundary):
    """Bit for bit, with what lies behind a step unlike in each."""
    q, cache = normal(rng, 16, heads, head_dim), filled(rng, kv_heads, head_dim)
    seen = (np.tri(16) > 0) & ((rng.random((16, 16)) < 0.5) | np.eye(16, dtype=bool))
    widest = attended(q, cache, boundary, seen)
    for width in WIDTHS:
        own = cache.copy()
        own[:, :, boundary + width :] = np.nan
        got = attended(q[:width], own, boundary, seen[:width, :width])
        assert np.array_equal(got, widest[:width])


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), SHAPES)
@pytest.mark.parametrize("boundary", [0, 6, 43])
def test_a_prompt_is_the_same_in_chunks_and_row_by_row(rng, heads, kv_heads, head_dim, boundary):
    """Rows of a task end at different slots: bit for bit what each is alone, in either step."""
    q, cache = normal(rng, 16, heads, head_dim), filled(rng, kv_heads, head_dim)
    chunk = attended(q, cache, boundary)
    assert np.array_equal(attended(q, cache, boundary, np.tri(16) > 0), chunk)
    for width in WIDTHS[:-1]:
        first = 16 - 2 * width if width < 8 else 8
        rows = slice(first, first + width)
        alone = np.tri(width) > 0
        assert np.array_equal(attended(q[rows], cache, boundary + first), chunk[rows])
        assert np.array_equal(attended(q[rows], cache, boundary + first, alone), chunk[rows])


@pytest.mark.parametrize("causal", [False, True])
def test_a_row_does_not_depend_on_those_beside_it(rng, causal):
    """Other queries of any size, that see more or less, leave its bits alone."""
    q, cache = normal(rng, 8, 16, 64), filled(rng, 8, 64)
    seen = (rng.random((8, 8)) < 0.5) | np.eye(8, dtype=bool)
    before = attended(q, cache, 77, None if causal else seen)
    for row in range(8):
        others, sights = 100 * normal(rng, *q.shape), np.eye(8, dtype=bool)
        others[row], sights[row] = q[row], seen[row]
        got = attended(others, cache, 77, None if causal else sights)
        assert np.array_equal(got[row], before[row])


def test_a_prompt_does_not_look_at_the_keys_of_later_rows(rng):
    q, cache = normal(rng, 8, 4, 64), filled(rng, 2, 64)
    before = attended(q, cache, 13)
    for row in range(7):
        changed = cache.copy()
        changed[0, :, 13 + row + 1 :] = np.nan
        changed[1, :, 13 + row + 1 :] *= 50
        assert np.array_equal(attended(q, changed, 13)[row], before[row])


def test_heads_share_a_pass_where_enough_tasks_remain():
    assert [heads_for(20, 5, width) for width in (1, 2, 3, 4, 5, 8)] == [2, 2, 1, 1, 4, 1]
    assert [heads_for(16, 8, width) for width in (1, 2, 4, 16)] == [2, 2, 1, 1]
    assert [heads_for(10, 2, width) for width in (1, 2, 4, 16)] == [1, 1, 1, 1]
    assert heads_for(32, 8, 1) == 4
    assert heads_for(1, 1, 1) == 1
