"""The GPU's fused kernels: what they compute is what their parts do, bit for bit.

As the tests of test_schedules_gpu.py that are marked `gpu`.
"""

import gpu_kernels
import numpy as np
import pytest
from gpu_kernels import (
    ATTENTIONS,
    CHAIN_SLOTS,
    CHAINS,
    EPS,
    FUSED_LINEARS,
    FUSED_WIDTHS,
    GROUP,
    GROUP_FORMATS,
    NORM_WIDTHS,
    POSITIONS,
    QUANTIZED_JOINS,
    QUANTIZED_WIDTHS,
    SLOTS,
    fused_linear,
    gated_quantizer,
    group_linear,
    kernel,
    normal,
    nothing,
    quantizer,
)

from relax_models.formats import pack, pack_scales, padded_k


def test_tiles_fit_a_block_and_split_a_sum_of_groups_one_way():
    from schedules.gpu.fused_linear import TEMPLATE
    from schedules.space import LARGE_CARD, choices
    from schedules.workload import read

    for shape in FUSED_LINEARS:
        for width in FUSED_WIDTHS:
            work = read(gpu_kernels.definition(fused_linear(*shape, width)))
            first, *others = choices([TEMPLATE], work, LARGE_CARD)
            for tile in (choice.tile for choice in (first, *others)):
                assert tile.warps * tile.teams <= 32
            # K is split the same way by all where the split is a part of the sum.
            if shape[0] in GROUP_FORMATS:
                assert {choice.tile.warps for choice in others} <= {first.tile.warps}
            assert len({choice.tile for choice in others}) == len(others)


def test_a_tile_of_too_many_warps_is_refused():
    from bitmtp_tvm.targets import tvm_target
    from schedules.gpu.fused_linear import TEMPLATE, FusedTile
    from schedules.workload import read

    work = read(gpu_kernels.definition(fused_linear(*FUSED_LINEARS[0], 1)))
    target = tvm_target(gpu_kernels.target_for("sm_86"))
    with pytest.raises(ValueError, match="does not fit a block"):
        TEMPLATE.make(work, FusedTile(11, 3, 1, 1), target)


# ---- on the device ----


def group_of(form):
    return GROUP if form in GROUP_FORMATS else 0


def random_weights(rng, form, segments, size):
    """Weights and their scales as the kernels take them."""
    rows, bits = sum(segments), GROUP_FORMATS.get(form, 2)
    codes = rng.integers(0, bits + 1, (rows, size)).astype(np.uint8)
    if not group_of(form):
        return [pack(codes, "cuda"), rng.random(len(segments), np.float32) + 1]
    scales = rng.uniform(0.5, 2, (rows, padded_k(size) // GROUP)).astype(np.float16)
    return [pack(codes, "cuda", bits), pack_scales(scales, "cuda", bits)]


def run_quantizer(kernels, item, arguments, size, group):
    """q, scale and total of an operation that ends in them."""
    width, padded = len(arguments[0]), padded_k(size)
    shape = (width, padded // group) if group else (width,)
    results = [np.full((width, padded), 99, np.int8), nothing(*shape)]
    return kernels.run(item, [*arguments, *results, np.full(shape, 7777, np.int32)])[-3:]


def assert_equal(got, want):
    for a, b in zip(got, want, strict=True):
        assert np.array_equal(a, b, equal_nan=True)


@pytest.mark.gpu
@pytest.mark.parametrize("width", FUSED_WIDTHS)
@pytest.mark.parametrize("shape", FUSED_LINEARS)
def test_a_linear_that_quantises_its_input_equals_two_kernels(kernels, rng, shape, width):
    form, segments, size, residual, activation, norm = shape
    group, rows = group_of(form), sum(segments)
    x = normal(rng, width, size) * 3
    x[0, size // 2] = 50
    x[-1, :2] = [np.nan, 1] if width > 2 else [0, 1]
    x = [x, rng.uniform(0.5, 2, size).astype(np.float32)] if norm else [x]
    weights = random_weights(rng, form, segments, size)
    added = [normal(rng, width, rows)] if residual else []
    parts = run_quantizer(kernels, quantizer(size, group, norm, width), x, size, group)
    item = group_linear(segments, size, residual, form, width)
    want = kernels.run(item, [*parts, *weights, *added, nothing(width, rows)])[-1]
    columns = segments[0] if activation else rows
    item = fused_linear(*shape, width)
    got = kernels.run(item, [*x, *weights, *added, nothing(width, columns)])[-1]
    assert np.isfinite(got).all(1).sum() == (width - 1 if width > 2 else width)
    if not activation:
        assert_equal([got], [want])
        return
    # The product itself is never written elsewhere: compare what is made of it.
    norms = [] if group else [rng.uniform(0.5, 2, columns).astype(np.float32)]
    item = gated_quantizer(columns, group, activation, width)
    whole = run_quantizer(kernels, item, [want, *norms], columns, group)
    item = quantizer(columns, group, not group, width)
    assert_equal(run_quantizer(kernels, item, [got, *norms], columns, group), whole)


@pytest.mark.gpu
@pytest.mark.parametrize("width", NORM_WIDTHS)
@pytest.mark.parametrize("shape", ATTENTIONS)
def test_heads_that_are_normed_as_they_are_turned_equal_two_kernels(kernels, rng, shape, width):
    heads, kv_heads, head_dim = shape
    qkv = normal(rng, width, (heads + 2 * kv_heads) * head_dim)
    norms = list(rng.uniform(0.5, 2, (2, head_dim)).astype(np.float32))
    position = rng.integers(0, POSITIONS, width).astype(np.int32)
    table = normal(rng, POSITIONS, head_dim // 2, 2)
    cache = normal(rng, 2, kv_heads, SLOTS, head_dim).astype(np.float16)
    rest = [position, np.array([17], np.int32), table, cache, nothing(width, heads, head_dim)]
    item = kernel("qk_norm", *shape, EPS, width=width)
    normed = kernels.run(item, [qkv, *norms, nothing(*qkv.shape)])[-1]
    item = kernel("rope_kv_write", *shape, POSITIONS, SLOTS, width=width)
    want = kernels.run(item, [normed, *rest])[-2:]
    item = kernel("norm_rope_kv_write", *shape, POSITIONS, SLOTS, EPS, width=width)
    assert_equal(kernels.run(item, [qkv, *norms, *rest])[-2:], want)
    assert not np.array_equal(want[0], cache)


@pytest.mark.gpu
@pytest.mark.parametrize("boundary", [0, 570, 1900])
@pytest.mark.parametrize("width", QUANTIZED_WIDTHS)
@pytest.mark.parametrize(("heads", "head_dim"), QUANTIZED_JOINS)
def test_attention_that_is_quantised_as_it_is_joined_equals_two_kernels(
    kernels, rng, heads, head_dim, width, boundary
):
    """Chains behind the last one in use hold what is no number."""
    used = min(CHAINS, (boundary + width - 1) // CHAIN_SLOTS + 1)
    parts = [normal(rng, width, heads, CHAINS), rng.uniform(1, 9, (width, heads, CHAINS))]
    parts = [part.astype(np.float32) for part in (*parts, normal(rng, *parts[0].shape, head_dim))]
    for part in parts:
        part[:, :, used:] = np.nan
    inputs, size = [*parts, np.array([boundary], np.int32)], heads * head_dim
    item = kernel("attention_join", heads, head_dim, width=width)
    whole = kernels.run(item, [*inputs, nothing(width, size)])[-1]
    item = kernel("quantize", size, GROUP, width=width)
    want = run_quantizer(kernels, item, [whole], size, GROUP)
    item = kernel("attention_join_quantize", heads, head_dim, GROUP, width=width)
    assert_equal(run_quantizer(kernels, item, inputs, size, GROUP), want)
    assert np.isfinite(want[1]).all() and np.abs(want[0].astype(int)).max() == 127
