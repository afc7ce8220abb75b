"""The processor's kernels of the formats with a scale for every 128 columns."""

import numpy as np
import pytest
from cpu_kernels import run, scheduled
from gpu_kernels import normal

from relax_models import ops
from relax_models.formats import FORMATS, pack, pack_scales

GROUP = 128
EPS = 1e-6
GROUP_FORMATS = ("ternary-g128", "binary-g128")
WIDTHS = (1, 2, 3, 5, 8, 16, 64)


@pytest.fixture
def rng():
    return np.random.default_rng(17)


def weights(rng, name, n, k):
    """Codes, float16 scales, one for every group, and the integer weights of the codes."""
    bits = FORMATS[name].bits
    codes = rng.integers(0, 3 if bits == 2 else 2, (n, k)).astype(np.uint8)
    scales = rng.uniform(0.01, 0.2, (n, k // GROUP)).astype(np.float16)
    return codes, scales, codes.astype(int) - 1 if bits == 2 else 2 * codes.astype(int) - 1


def activations(rng, width, k):
    q = rng.integers(-128, 128, (width, k)).astype(np.int8)
    scale = rng.uniform(0.001, 0.1, (width, k // GROUP)).astype(np.float32)
    return q, scale, q.reshape(width, -1, GROUP).sum(-1, dtype=np.int32)


def group_sums(q, signed):
    """Exact sums of every group: `(width, n, groups)`."""
    groups = q.reshape(len(q), -1, GROUP).astype(int)
    return np.einsum("wgk,ngk->wng", groups, signed.reshape(len(signed), -1, GROUP))


@pytest.mark.parametrize("name", GROUP_FORMATS)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize(("rows", "k"), [((256, 128, 128), 256), ((30, 7), 640), ((5,), 128)])
def test_linear(rng, name, width, rows, k):
    n = sum(rows)
    codes, scales, signed = weights(rng, name, n, k)
    q, scale, total = activations(rng, width, k)
    func = scheduled(ops.low_bit_linear(rows, k, "llvm", name), width=width)
    bits = FORMATS[name].bits
    arguments = [q, scale, total, pack(codes, "llvm", bits), pack_scales(scales, "llvm", bits)]
    got = run(func, [*arguments, np.zeros((width, n), np.float32)])[-1]
    factors = scale[:, None, :] * scales.astype(np.float32)
    want = (group_sums(q, signed) * factors.astype(np.float64)).sum(-1)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("name", GROUP_FORMATS)
def test_the_integer_part_is_exact(rng, name):
    """One group, all scales 1: nothing but the sum is left. The second row has the largest sums."""
    n, k = 9, GROUP
    codes, scales, signed = weights(rng, name, n, k)
    scales[:] = 1
    codes[3:], signed[3:] = (2, 1) if FORMATS[name].bits == 2 else (1, 1)
    q, scale, _ = activations(rng, 2, k)
    q[1], scale[:] = -128, 1
    total = q.reshape(2, 1, GROUP).sum(-1, dtype=np.int32)
    bits = FORMATS[name].bits
    arguments = [q, scale, total, pack(codes, "llvm", bits), pack_scales(scales, "llvm", bits)]
    func = scheduled(ops.low_bit_linear((n,), k, "llvm", name), width=2)
    got = run(func, [*arguments, np.zeros((2, n), np.float32)])[-1]
    assert np.array_equal(got, group_sums(q, signed)[..., 0].astype(np.float32))
    assert got[1].min() == -128 * GROUP


@pytest.mark.parametrize("name", GROUP_FORMATS)
def test_a_row_is_the_same_in_every_width_with_and_without_residual(rng, name):
    n, k, widest = 40, 512, max(WIDTHS)
    bits = FORMATS[name].bits
    codes, scales, _ = weights(rng, name, n, k)
    packed = [pack(codes, "llvm", bits), pack_scales(scales, "llvm", bits)]
    q, scale, total = activations(rng, widest, k)
    residual = normal(rng, widest, n)
    for added in (False, True):
        found = []
        for width in WIDTHS:
            rows = [array[:width] for array in (q, scale, total)]
            func = scheduled(ops.low_bit_linear((n,), k, "llvm", name, added), width=width)
            more = [residual[:width]] if added else []
            empty = np.zeros((width, n), np.float32)
            found.append(run(func, [*rows, *packed, *more, empty])[-1])
        for alone in found:
            assert np.array_equal(alone, found[-1][: len(alone)])


@pytest.mark.parametrize("name", GROUP_FORMATS)
def test_embedding_rows(rng, name):
    vocab, hidden = 45, 256
    bits = FORMATS[name].bits
    codes, scales, signed = weights(rng, name, vocab, hidden)
    tokens = np.array([44, 0, 13], np.int32)
    packed = [pack(codes, "llvm", bits), pack_scales(scales, "llvm", bits)]
    func = scheduled(ops.low_bit_embed(vocab, hidden, "llvm", name), width=3)
    got = run(func, [tokens, *packed, np.zeros((3, hidden), np.float32)])[-1]
    assert np.array_equal(got, (signed * np.repeat(scales.astype(np.float32), GROUP, 1))[tokens])


def quantized(x):
    """q, scale and total of each group, as the definition has them."""
    groups = x.reshape(len(x), -1, GROUP)
    bound = np.maximum(np.abs(groups).max(-1), np.float32(1e-5))
    q = np.clip(np.rint(groups * (np.float32(127) / bound)[..., None]), -128, 127)
    return q.reshape(x.shape).astype(np.int8), bound / np.float32(127), q.sum(-1).astype(np.int32)


def check_quantized(got, want):
    difference = np.abs(got[0].astype(int) - want[0])
    assert difference.max() <= 1
    assert (difference > 0).mean() < 2e-3
    np.testing.assert_allclose(got[1], want[1], rtol=1e-5)
    sums = got[0].reshape(len(got[0]), -1, GROUP).sum(-1, dtype=np.int32)
    assert np.array_equal(got[2], sums)


def empty(width, size):
    shape = (width, size // GROUP)
    return [
        np.full((width, size), 9, np.int8),
        np.zeros(shape, np.float32),
        np.zeros(shape, np.int32),
    ]


@pytest.mark.parametrize("width", [1, 5])
def test_quantisation_by_groups(rng, width):
    size = 640
    x, weight = normal(rng, width, size) * 3, rng.uniform(0.5, 2, size).astype(np.float32)
    # One group is far larger than the rest: its scale must not be theirs.
    x[:, :GROUP] *= 50
    got = run(scheduled(ops.quantize(size, GROUP), width=width), [x, *empty(width, size)])[-3:]
    check_quantized(got, quantized(x))
    func = scheduled(ops.norm_quantize(size, EPS, GROUP), width=width)
    got = run(func, [x, weight, *empty(width, size)])[-3:]
    normed = x / np.sqrt(np.square(x).mean(-1, keepdims=True) + np.float32(EPS)) * weight
    check_quantized(got, quantized(normed))


@pytest.mark.parametrize("width", [1, 5])
def test_silu_gate(rng, width):
    size = 256
    gate_up = normal(rng, width, 2 * size) * 8
    gate_up[0, :4] = [100, -100, 0, -1e-3]
    gate, up = gate_up[:, :size].astype(np.float64), gate_up[:, size:]
    gated = (gate / (1 + np.exp(-gate)) * up).astype(np.float32)
    func = scheduled(ops.gated_quantize(size, GROUP), width=width)
    check_quantized(run(func, [gate_up, *empty(width, size)])[-3:], quantized(gated))


def test_silu_gate_with_norm(rng):
    size, width = 256, 2
    gate_up, weight = normal(rng, width, 2 * size), rng.uniform(0.5, 2, size).astype(np.float32)
    gate, up = gate_up[:, :size], gate_up[:, size:]
    gated = gate / (1 + np.exp(-gate)) * up
    normed = gated / np.sqrt(np.square(gated).mean(-1, keepdims=True) + np.float32(EPS)) * weight
    bound = np.abs(normed).max(-1)
    q, scale = np.zeros((width, size), np.int8), np.zeros(width, np.float32)
    func = scheduled(ops.gated_norm_quantize(size, EPS, "silu"), width=width)
    got = run(func, [gate_up, weight, q, scale, np.zeros(width, np.int32)])[-3:]
    assert np.abs(got[0] - np.rint(normed * (127 / bound)[:, None])).max() <= 1
    np.testing.assert_allclose(got[1], bound / 127, rtol=1e-5)


@pytest.mark.parametrize("head_dim", [12, 128])
@pytest.mark.parametrize("width", [1, 3])
def test_query_and_key_norms(rng, head_dim, width):
    heads, kv_heads = 4, 2
    qkv = normal(rng, width, (heads + 2 * kv_heads) * head_dim)
    q_norm, k_norm = rng.uniform(0.5, 2, (2, head_dim)).astype(np.float32)
    func = scheduled(ops.qk_norm(heads, kv_heads, head_dim, EPS), width=width)
    got = run(func, [qkv, q_norm, k_norm, np.zeros_like(qkv)])[-1].reshape(width, -1, head_dim)
    x = qkv.reshape(width, -1, head_dim)
    want = x / np.sqrt(np.square(x).mean(-1, keepdims=True) + np.float32(EPS))
    want[:, :heads] *= q_norm
    want[:, heads : heads + kv_heads] *= k_norm
    np.testing.assert_allclose(got[:, : heads + kv_heads], want[:, : heads + kv_heads], rtol=1e-5)
    assert np.array_equal(got[:, heads + kv_heads :], x[:, heads + kv_heads :])
