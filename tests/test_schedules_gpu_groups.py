"""The GPU's kernels of formats with group scales, against the numpy twin and in every width.

As the tests of test_schedules_gpu.py that are marked `gpu`.
"""

import numpy as np
import pytest
from gpu_kernels import (
    ATTENTIONS,
    EPS,
    GROUP,
    GROUP_FORMATS,
    GROUP_LINEARS,
    GROUP_SIZES,
    GROUP_WIDTHS,
    NORM_SIZES,
    NORM_WIDTHS,
    group_linear,
    group_warps,
    kernel,
    normal,
    nothing,
    tiled_as,
)

from bitmtp_tvm import reference
from relax_models.formats import pack, pack_scales, padded_k

pytestmark = pytest.mark.gpu


def random_weights(rng, rows, size, bits):
    """Codes and group scales, and both as the kernels take them."""
    codes = rng.integers(0, bits + 1, (rows, size)).astype(np.uint8)
    scales = rng.uniform(0.5, 2, (rows, padded_k(size) // GROUP)).astype(np.float16)
    packed = [pack(codes, "cuda", bits), pack_scales(scales, "cuda", bits)]
    return codes, scales, packed


def fused(a, b, c):
    """a * b + c of float32, rounded once (but for a tie of the sum's second rounding)."""
    return (a.astype(np.float64) * b + c).astype(np.float32)


def summed_by_the_tree(q, scale, total, codes, scales, bits):
    """`reference.group_linear` in the order of schedules/gpu/low_bit_group_gemv.py."""
    width, groups = scale.shape
    rows, warps = len(codes), group_warps(groups)
    parts = q.reshape(width, groups, 4, 32).astype(np.float32)
    weights = (2 // bits * codes).astype(np.float32).reshape(rows, groups, 4, 32)
    sums = np.zeros((warps, 4, width, rows), np.float32)
    for g in range(groups):
        factor = scale[:, g, None] * scales.astype(np.float32)[None, :, g]
        for lane in range(4):
            share = parts[:, g, lane] @ weights[:, g, lane].T
            share -= total[:, g, None] if lane == 0 else 0
            sums[g % warps, lane] = fused(share, factor, sums[g % warps, lane])
    by_warp = (sums[:, 0] + sums[:, 2]) + (sums[:, 1] + sums[:, 3])
    result = by_warp[0]
    for i in range(1, warps):
        result = result + by_warp[i]
    return result


@pytest.mark.parametrize("form", GROUP_FORMATS)
@pytest.mark.parametrize(("segments", "size", "residual"), GROUP_LINEARS)
def test_linear_is_one_tree_in_every_width(kernels, rng, segments, size, residual, form):
    rows, bits, widest = sum(segments), GROUP_FORMATS[form], max(GROUP_WIDTHS)
    codes, scales, packed = random_weights(rng, rows, size, bits)
    q, scale, total = reference.quantize_groups(normal(rng, widest, size) * 3 + 1)
    q[1], total[1] = -128, -128 * GROUP
    scale[7, -1] = np.nan
    added = normal(rng, widest, rows)
    want = summed_by_the_tree(q, scale, total, codes, scales, bits)
    plain = reference.group_linear(q, scale, total, codes, scales, bits)
    np.testing.assert_allclose(want, plain, rtol=1e-4, atol=np.nanmax(np.abs(plain)) * 1e-6)
    assert np.isnan(want).all(1).nonzero()[0].tolist() == [7]
    want = want + added if residual else want
    for width in GROUP_WIDTHS:
        # Row 3 is in all of them, each time elsewhere.
        step = slice(max(4 - width, 0), max(4, width))
        arguments = [q[step], scale[step], total[step], *packed]
        arguments += [added[step]] if residual else []
        for item in tiled_as(group_linear(segments, size, residual, form, width)):
            got = kernels.run(item, [*arguments, nothing(width, rows)])[-1]
            assert np.array_equal(got, want[step], equal_nan=True), item.name


@pytest.mark.parametrize("form", GROUP_FORMATS)
@pytest.mark.parametrize("width", NORM_WIDTHS)
@pytest.mark.parametrize("size", GROUP_SIZES)
def test_embedding_equals_the_twin(kernels, rng, size, width, form):
    bits = GROUP_FORMATS[form]
    codes, scales, packed = random_weights(rng, 70, size, bits)
    tokens = rng.integers(0, 70, width).astype(np.int32)
    tokens[-1] = 69
    item = kernel("low_bit_embed", 70, size, "cuda", form, width=width)
    got = kernels.run(item, [tokens, *packed, nothing(width, size)])[-1]
    assert np.array_equal(got, reference.low_bit_embed(tokens, codes, scales, bits))


def quantized(kernels, op, size, arguments, *settings):
    """Run an operation that ends in q, scale and total by groups; returns these."""
    width, shape = len(arguments[0]), (len(arguments[0]), padded_k(size) // GROUP)
    results = [np.full((width, padded_k(size)), 99, np.int8), nothing(*shape)]
    results.append(np.full(shape, 7777, np.int32))
    return kernels.run(kernel(op, size, *settings, width=width), [*arguments, *results])[-3:]


def assert_same(got, want):
    for a, b in zip(got, want, strict=True):
        assert np.array_equal(a, b, equal_nan=True)


def assert_about(got, want):
    """The same but for the last bits of what is quantised."""
    q, scale, total = got
    assert np.abs(q.astype(int) - want[0]).max() <= 1 and (q != want[0]).mean() < 1e-3
    np.testing.assert_allclose(scale, want[1], rtol=1e-5)
    columns = q.reshape(*scale.shape, -1) if scale.ndim == 2 else q
    assert np.array_equal(total, columns.sum(-1, dtype=np.int32))


@pytest.mark.parametrize("width", NORM_WIDTHS)
@pytest.mark.parametrize("size", GROUP_SIZES)
def test_groups_are_quantised_as_the_twin_does(kernels, rng, size, width):
    x = normal(rng, width, size) * 10.0 ** rng.integers(-9, 9, (width, 1))
    x = x.astype(np.float32)
    x[0, -GROUP:] = 0
    x[-1, 0] = 60
    x[-1, 1:9] = (np.arange(8) + 0.5) * np.float32(60 / 127)
    got = quantized(kernels, "quantize", size, [x], GROUP)
    assert_same(got, reference.quantize_groups(x))
    x[0, 130] = np.nan
    broken = quantized(kernels, "quantize", size, [x], GROUP)
    assert np.argwhere(np.isnan(broken[1])).tolist() == [[0, 1]]
    kept = np.isfinite(broken[1])
    for a, b in zip(broken, got, strict=True):
        assert np.array_equal(a.reshape(*kept.shape, -1)[kept], b.reshape(*kept.shape, -1)[kept])


@pytest.mark.parametrize("width", NORM_WIDTHS)
@pytest.mark.parametrize("size", GROUP_SIZES)
def test_norm_by_groups(kernels, rng, size, width):
    """Small whole numbers have exact sums of squares, so that every tree gives the same."""
    weight = rng.uniform(0.5, 2, size).astype(np.float32)
    x = rng.integers(-8, 9, (width, size)).astype(np.float32)
    got = quantized(kernels, "norm_quantize", size, [x, weight], EPS, GROUP)
    assert_same(got, reference.quantize_groups(reference.rms_norm(x, weight, EPS)))
    x = normal(rng, width, size)
    together = quantized(kernels, "norm_quantize", size, [x, weight], EPS, GROUP)
    assert_about(together, reference.quantize_groups(reference.rms_norm(x, weight, EPS)))
    alone = quantized(kernels, "norm_quantize", size, [x[-1:], weight], EPS, GROUP)
    assert_same(alone, [part[-1:] for part in together])


@pytest.mark.parametrize("width", NORM_WIDTHS)
@pytest.mark.parametrize("size", GROUP_SIZES)
def test_gated_groups(kernels, rng, size, width):
    gate_up = normal(rng, width, 2 * size) * 4
    gate_up[0, :3] = [-200, 200, -88]
    together = quantized(kernels, "gated_quantize", size, [gate_up], GROUP)
    assert_about(together, reference.gated_quantize(gate_up[:, :size], gate_up[:, size:]))
    alone = quantized(kernels, "gated_quantize", size, [gate_up[-1:]], GROUP)
    assert_same(alone, [part[-1:] for part in together])


@pytest.mark.parametrize("width", NORM_WIDTHS)
@pytest.mark.parametrize("size", NORM_SIZES)
def test_gated_norm_with_silu(kernels, rng, size, width):
    gate_up, weight = normal(rng, width, 2 * size) * 4, rng.uniform(0.5, 2, size)
    weight = weight.astype(np.float32)
    results = [np.full((width, padded_k(size)), 99, np.int8), nothing(width)]
    item = kernel("gated_norm_quantize", size, EPS, "silu", width=width)
    got = kernels.run(item, [gate_up, weight, *results, np.zeros(width, np.int32)])[-3:]
    halves = gate_up[:, :size], gate_up[:, size:]
    assert_about(got, reference.gated_norm_quantize(*halves, weight, EPS, "silu"))


@pytest.mark.parametrize("width", NORM_WIDTHS)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), ATTENTIONS)
def test_qk_norm(kernels, rng, heads, kv_heads, head_dim, width):
    weights = rng.uniform(0.5, 2, (2, head_dim)).astype(np.float32)

    def run(qkv):
        item = kernel("qk_norm", heads, kv_heads, head_dim, EPS, width=len(qkv))
        return kernels.run(item, [qkv, *weights, nothing(*qkv.shape)])[-1]

    shape = (width, (heads + 2 * kv_heads) * head_dim)
    whole = rng.integers(-8, 9, shape).astype(np.float32)
    assert np.array_equal(run(whole), reference.qk_norm(whole, *weights, heads, EPS))
    qkv = normal(rng, *shape)
    qkv[0, 1] = np.nan
    together = run(qkv)
    want = reference.qk_norm(qkv, *weights, heads, EPS)
    np.testing.assert_allclose(together, want, rtol=1e-5)
    assert np.array_equal(together[:, -kv_heads * head_dim :], qkv[:, -kv_heads * head_dim :])
    assert np.array_equal(run(qkv[-1:]), together[-1:], equal_nan=True)
