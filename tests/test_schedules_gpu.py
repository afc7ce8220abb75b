"""The GPU's rules: that all compile as they should, and what they compute against the numpy twin.

The tests marked `gpu` need TVM's runtime alone where `--kernels` names a built library.
"""

import re
from itertools import product

import gpu_kernels
import numpy as np
import pytest
from gpu_kernels import (
    ATTENTIONS,
    CAUSAL_WIDTHS,
    EPS,
    FUSED_LINEARS,
    GROUP,
    HEAD_ROWS,
    HEADS,
    LINEAR_WIDTHS,
    LINEARS,
    MASKED_WIDTHS,
    NORM_SIZES,
    NORM_WIDTHS,
    POSITIONS,
    SLOTS,
    VOCABULARIES,
    attention,
    fused_linear,
    group_linear,
    kernel,
    linear,
    normal,
    nothing,
    tiled_as,
)

from bitmtp_tvm import reference
from relax_models.formats import bf16_bits, pack, padded_k

OPERATIONS = {
    "accept",
    "attention",
    "attention_join",
    "attention_join_quantize",
    "attention_parts",
    "choose",
    "embed",
    "final_norm",
    "final_norm_codes",
    "gated_norm_quantize",
    "gated_quantize",
    "greedy",
    "head",
    "head_codes",
    "head_rescore",
    "low_bit_embed",
    "low_bit_linear",
    "norm_low_bit_linear",
    "norm_quantize",
    "norm_rope_kv_write",
    "qk_norm",
    "quantize",
    "quantize_low_bit_linear",
    "rope_attention_parts",
    "rope_kv_write",
    "softmax_parts",
    "step_rows",
}
ARCHES = ("sm_86", "sm_87", "sm_90a")


def model_kernels(hidden, ffn, heads, kv_heads, head_dim, vocab, width):
    """Every operation of a model of these sizes at one width; prefill above 64 rows."""
    query, kv = heads * head_dim, kv_heads * head_dim
    yield kernel("embed", vocab, hidden, width=width)
    yield kernel("norm_quantize", hidden, EPS, width=width)
    yield kernel("gated_norm_quantize", ffn, EPS, "relu2", width=width)
    yield kernel("rope_kv_write", heads, kv_heads, head_dim, 4096, 4224, width=width)
    yield kernel("attention", heads, kv_heads, head_dim, 4224, width > 64, width=width)
    yield linear((query, kv, kv), hidden, False, width)
    yield linear((hidden,), query, True, width)
    yield linear((ffn, ffn), hidden, False, width)
    yield linear((hidden,), ffn, True, width)
    if width <= 64:
        yield kernel("final_norm", hidden, EPS, width=width, rows=width)
        yield kernel("head", vocab, hidden, rows=width)
        yield kernel("greedy", vocab, rows=width)


def group_model_kernels(hidden, ffn, heads, kv_heads, head_dim, vocab, form, width):
    """The operations that a model with group scales has and the one above has not.

    Of its linears that with the fewest and that with the most groups: the others are like them.
    """
    query, kv = heads * head_dim, kv_heads * head_dim
    yield kernel("low_bit_embed", vocab, hidden, "cuda", form, width=width)
    yield kernel("norm_quantize", hidden, EPS, GROUP, width=width)
    yield kernel("qk_norm", heads, kv_heads, head_dim, EPS, width=width)
    yield kernel("quantize", query, GROUP, width=width)
    yield kernel("gated_quantize", ffn, GROUP, width=width)
    yield group_linear((query, kv, kv), hidden, False, form, width)
    yield group_linear((hidden,), ffn, True, form, width)
    if width <= 64:
        yield group_linear((vocab,), hidden, False, form, width)


def real_kernels():
    for width in (1, 8, 128):
        yield from model_kernels(2560, 6912, 20, 5, 128, 128256, width)
    for width in (1, 128):
        yield from group_model_kernels(2560, 9728, 32, 8, 128, 151669, "ternary-g128", width)
    yield from group_model_kernels(4096, 12288, 32, 8, 128, 151669, "binary-g128", 8)
    yield from model_kernels(640, 1792, 10, 2, 64, 8192, 8)
    yield kernel("gated_norm_quantize", 6912, EPS, "silu", width=8)
    yield kernel("norm_rope_kv_write", 16, 8, 128, 4096, 4224, EPS, width=8)
    yield kernel("attention_join_quantize", 16, 128, GROUP, width=8)
    yield kernel("attention_join_quantize", 32, 128, GROUP, width=64)
    for shape in FUSED_LINEARS[:3]:
        yield fused_linear(*shape, 1)
    for shape in FUSED_LINEARS[1:3] + FUSED_LINEARS[8:10]:
        yield fused_linear(*shape, 2)


@pytest.fixture(scope="module")
def source():
    """The CUDA text of every operation at the shapes of the real models."""
    return gpu_kernels.cuda_text(list(real_kernels()), gpu_kernels.target_for("sm_86"))


def test_every_operation_has_a_rule_for_the_gpu():
    from schedules import gpu

    assert set(gpu.RULES) | set(gpu.TEMPLATES) == OPERATIONS
    assert not set(gpu.RULES) & set(gpu.TEMPLATES)
    assert {item.op for item in gpu_kernels.all_kernels()} == OPERATIONS


@pytest.mark.parametrize("op", sorted(OPERATIONS))
def test_a_rule_keeps_signature_and_stamp(op):
    from bitmtp_tvm.targets import tvm_target
    from schedules import rule
    from schedules.workload import read

    item = next(item for item in gpu_kernels.all_kernels() if item.op == op)
    func = gpu_kernels.definition(item)
    made = rule.apply(func, tvm_target(gpu_kernels.target_for("sm_90a")))
    assert read(made) == read(func)
    assert made.attrs["tirx.is_scheduled"]


@pytest.mark.parametrize("arch", ARCHES)
def test_kernels_of_the_real_shapes_compile_without_spills(source, arch):
    from bitmtp_tvm.cubin import find_cubins
    from bitmtp_tvm.nvrtc import compile_cubin

    cubin, _ = compile_cubin(source, arch)
    (found,) = find_cubins(cubin)
    assert len(found.kernels) == len({item.name for item in real_kernels()})
    assert {k.name: k.stack_bytes for k in found.kernels if k.stack_bytes} == {}
    assert max(k.shared_bytes for k in found.kernels) <= 48 * 1024
    # Linears on the tensor cores, and attention, hold many sums: two or three blocks of four warps
    # are left room.
    most = {
        r"low_bit_linear\w+_width_8_": 176,
        r"low_bit_linear\w+_width_128_": 255,
        r"attention_\w+_width_128_": 255,
        "attention_": 168,
    }
    limits = {
        k.name: next((n for name, n in most.items() if re.match(name, k.name)), 128)
        for k in found.kernels
    }
    assert {k.name: k.registers for k in found.kernels if k.registers > limits[k.name]} == {}


@pytest.mark.parametrize("arch", ARCHES)
def test_heads_of_many_rows_compile_without_spills(arch):
    from bitmtp_tvm.cubin import find_cubins
    from bitmtp_tvm.nvrtc import compile_cubin

    heads = [
        kernel("head", *shape, rows=rows)
        for shape, rows in product([(128256, 2560), (8192, 640), (1001, 1056)], (16, 32, 64))
    ]
    text = gpu_kernels.cuda_text(heads, gpu_kernels.target_for("sm_86"))
    (found,) = find_cubins(compile_cubin(text, arch)[0])
    assert len(found.kernels) == len(heads)
    assert {k.name: k.stack_bytes for k in found.kernels if k.stack_bytes} == {}
    assert max(k.shared_bytes for k in found.kernels) <= 48 * 1024


def test_weights_and_activations_are_loaded_by_16_bytes(source):
    bodies = re.split(r'^extern "C" __global__ ', source, flags=re.MULTILINE)
    linears = [b for b in bodies if re.search(r" low_bit_linear\w+\([^)]*\) \{", b)]
    assert len(linears) == len({k.name for k in real_kernels() if k.op == "low_bit_linear"})
    for text in linears:
        loads = set(re.findall(r"\*\((\w+)\*\)\(q_ptr", text))
        # A lane's part of an mma's 32 columns is 8 bytes, where the sums of 32 columns stand apart.
        vector = "int2" if "_g128_" in text and "mma_int_sync" in text else "int4"
        # Those of many rows are copied to shared memory by 16 bytes.
        assert loads == (set() if "cp_async" in text else {vector})
        weights = r"_v4_u32\(words_ptr\[|\*\(uint4\*\)\(weight_ptr"
        if "cp_async" in text and "_g128_" in text:
            weights = r"cp_async_cg\w+_16\([^;]*&\(weight_ptr"
        assert re.search(weights, text)
        assert not re.search(r"(?<!total)(?<!&\()(?:\bweight|\bq)_ptr\[", text)


def test_tiles_fit_any_shape():
    from schedules.gpu.low_bit_gemv import choose_tile

    for width, tiles, blocks in product((1, 7, 9, 64, 2048), (1, 160, 864), (1, 4, 11, 54, 172)):
        tile = choose_tile(width, tiles, blocks)
        assert tile.warps <= 16 and tile.tokens <= min(width, 8)
        assert tile.warps * tile.ahead * -(-blocks // (tile.warps * tile.ahead)) >= blocks


def test_the_sum_over_groups_hangs_on_their_number_alone():
    from schedules.gpu.low_bit_group_gemv import choose_tile
    from schedules.gpu.packed import GROUP_PACKINGS

    widths, tiles, groups = (1, 2, 3, 7, 8, 9, 64, 2048), (1, 128, 9480), (1, 3, 20, 76, 96, 300)
    for packing, width, n, g in product(GROUP_PACKINGS.values(), widths, tiles, groups):
        tile = choose_tile(width, n, g, packing)
        assert tile.warps == gpu_kernels.group_warps(g) <= 16
        assert tile.tokens <= min(width, 8)
        assert tile.row_tiles * packing.rows * tile.tokens <= 16


def test_a_head_reads_its_table_once_for_up_to_32_rows():
    from schedules.gpu.head_mma import choose_tile

    for rows in range(1, 200):
        tile = choose_tile(rows)
        assert tile.groups == 1 or tile.groups % 2 == 0
        assert -(-rows // (8 * tile.groups)) == -(-rows // 32)


def test_masks_of_more_than_64_rows_are_refused():
    with pytest.raises(ValueError, match="64 rows at most"):
        gpu_kernels.schedule([attention(8, 2, 64, False, 65)], gpu_kernels.target_for("sm_86"))


@pytest.mark.parametrize("op", ["quantize", "gated_quantize"])
def test_groups_of_rows_that_a_warp_cannot_load_are_refused(op):
    with pytest.raises(ValueError, match="no multiple of 4"):
        gpu_kernels.schedule([kernel(op, 130, GROUP, width=1)], gpu_kernels.target_for("sm_86"))


# ---- on the device ----


def words_of(seen):
    """`visible` masks `(W, 2)` uint32 of a boolean `(W, W)`."""
    bits = np.zeros((len(seen), 64), bool)
    bits[:, : len(seen)] = seen
    return np.packbits(bits, axis=1, bitorder="little").view(np.uint32)


@pytest.mark.gpu
@pytest.mark.parametrize("width", LINEAR_WIDTHS)
@pytest.mark.parametrize(("segments", "size", "residual"), LINEARS)
def test_linear_equals_the_twin(kernels, rng, segments, size, residual, width):
    rows = sum(segments)
    codes = rng.integers(0, 3, (rows, size)).astype(np.uint8)
    q = np.zeros((width, padded_k(size)), np.int8)
    q[:, :size] = rng.integers(-128, 128, (width, size))
    q[0, :size] = -128
    scale, total = rng.random(width, np.float32), q.sum(1, dtype=np.int32)
    weight_scale, added = rng.random(len(segments), np.float32) + 1, normal(rng, width, rows)
    arguments = [q, scale, total, pack(codes, "cuda"), weight_scale]
    arguments += [added] if residual else []
    want = reference.low_bit_linear(q, scale, total, codes, weight_scale, segments)
    want = want + added if residual else want
    for item in tiled_as(linear(segments, size, residual, width)):
        got = kernels.run(item, [*arguments, nothing(*added.shape)])[-1]
        assert np.array_equal(got, want), item.name


def quantized(kernels, op, size, x, weight, *settings):
    """Run a quantising norm on x `(W, …)`; returns q, scale, total."""
    width = len(x)
    results = [np.full((width, padded_k(size)), 99, np.int8), nothing(width)]
    item = kernel(op, size, EPS, *settings, width=width)
    return kernels.run(item, [x, weight, *results, np.zeros(width, np.int32)])[-3:]


@pytest.mark.gpu
@pytest.mark.parametrize("width", NORM_WIDTHS)
@pytest.mark.parametrize("size", NORM_SIZES)
def test_norms_equal_the_twin_where_its_sums_are_exact(kernels, rng, size, width):
    """Small whole numbers have exact sums of squares, so that every tree gives the same."""
    weight = rng.uniform(0.5, 2, size).astype(np.float32)
    x = rng.integers(-8, 9, (width, size)).astype(np.float32)
    x[-1] = 0
    got = quantized(kernels, "norm_quantize", size, x, weight)
    for a, b in zip(got, reference.quantize(reference.rms_norm(x, weight, EPS)), strict=True):
        assert np.array_equal(a, b)
    x = rng.integers(-3, 4, (width, 2 * size)).astype(np.float32)
    got = quantized(kernels, "gated_norm_quantize", size, x, weight, "relu2")
    want = reference.gated_norm_quantize(x[:, :size], x[:, size:], weight, EPS)
    for a, b in zip(got, want, strict=True):
        assert np.array_equal(a, b)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("op", "settings"),
    [
        ("norm_quantize", ()),
        ("gated_norm_quantize", ("relu2",)),
        ("gated_norm_quantize", ("silu",)),
    ],
)
@pytest.mark.parametrize("size", NORM_SIZES)
def test_a_quantised_row_is_the_same_in_every_width(kernels, rng, op, settings, size):
    weight = rng.uniform(0.5, 2, size).astype(np.float32)
    columns = size if op == "norm_quantize" else 2 * size
    x = normal(rng, max(NORM_WIDTHS), columns)
    x[3, 5] = np.nan
    together = quantized(kernels, op, size, x, weight, *settings)
    assert np.isnan(together[1]).tolist() == [i == 3 for i in range(len(x))]
    for i in range(len(x)):
        alone = quantized(kernels, op, size, x[i : i + 1], weight, *settings)
        for a, b in zip(together, alone, strict=True):
            assert np.array_equal(a[i : i + 1], b, equal_nan=True)


@pytest.mark.gpu
@pytest.mark.parametrize("width", NORM_WIDTHS)
@pytest.mark.parametrize("size", NORM_SIZES)
def test_final_norm_and_embedding(kernels, rng, size, width):
    x, weight = normal(rng, width, size), rng.uniform(0.5, 2, size).astype(np.float32)
    asked = np.arange(width, dtype=np.int32)[::-1].copy()
    asked[1:3] = -1
    item = kernel("final_norm", size, EPS, width=width, rows=width)
    got = kernels.run(item, [x, weight, asked, nothing(width, size)])[-1]
    want = reference.rms_norm(x[asked], weight, EPS) * (asked >= 0)[:, None]
    np.testing.assert_allclose(got, want, rtol=1e-5)
    table = bf16_bits(normal(rng, 50, size))
    tokens = rng.integers(0, 50, width).astype(np.int32)
    item = kernel("embed", 50, size, width=width)
    got = kernels.run(item, [tokens, table, nothing(width, size)])[-1]
    assert np.array_equal(got, reference.embed(tokens, table))


@pytest.mark.gpu
@pytest.mark.parametrize("width", [1, 9, 130])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), ATTENTIONS)
def test_rope_and_kv_write_equal_the_twin(kernels, rng, heads, kv_heads, head_dim, width):
    boundary = 17
    qkv = normal(rng, width, (heads + 2 * kv_heads) * head_dim)
    position = rng.integers(0, POSITIONS, width).astype(np.int32)
    table = normal(rng, POSITIONS, head_dim // 2, 2)
    cache = normal(rng, 2, kv_heads, SLOTS, head_dim).astype(np.float16)
    item = kernel("rope_kv_write", heads, kv_heads, head_dim, POSITIONS, SLOTS, width=width)
    arguments = [qkv, position, np.array([boundary], np.int32), table, cache]
    *_, written, q = kernels.run(item, [*arguments, nothing(width, heads, head_dim)])
    rows = qkv.reshape(width, -1, head_dim)
    assert np.array_equal(q, reference.rope(rows[:, :heads], position, table))
    keys = reference.rope(rows[:, heads : heads + kv_heads], position, table)
    cache[0, :, boundary : boundary + width] = keys.transpose(1, 0, 2)
    cache[1, :, boundary : boundary + width] = rows[:, heads + kv_heads :].transpose(1, 0, 2)
    assert np.array_equal(written, cache)


def attend(kernels, shape, q, cache, boundary, seen=None):
    """Masked attention, or causal where `seen` is None."""
    heads, _, head_dim = shape
    masks = [] if seen is None else [words_of(seen)]
    arguments = [q, cache, np.array([boundary], np.int32), *masks]
    item = attention(*shape, seen is None, len(q))
    return kernels.run(item, [*arguments, nothing(len(q), heads * head_dim)])[-1]


def attention_inputs(rng, shape, width, boundary):
    """Queries, and a cache that is no number behind the rows of the step."""
    heads, kv_heads, head_dim = shape
    cache = normal(rng, 2, kv_heads, SLOTS, head_dim).astype(np.float16)
    cache[:, :, boundary + width :] = np.nan
    return normal(rng, width, heads, head_dim) * 2, cache


@pytest.mark.gpu
@pytest.mark.parametrize("boundary", [0, 31, 300, 570])
@pytest.mark.parametrize("width", MASKED_WIDTHS)
@pytest.mark.parametrize("shape", ATTENTIONS)
def test_masked_attention(kernels, rng, shape, width, boundary):
    q, cache = attention_inputs(rng, shape, width, boundary)
    seen = (rng.random((width, width)) < 0.4) | np.eye(width, dtype=bool)
    got = attend(kernels, shape, q, cache, boundary, seen)
    want = reference.attention(q, *cache.astype(np.float32), boundary, seen)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("boundary", [0, 31, 570])
@pytest.mark.parametrize("width", CAUSAL_WIDTHS)
@pytest.mark.parametrize("shape", ATTENTIONS)
def test_causal_attention_gives_what_one_row_alone_gets(kernels, rng, shape, width, boundary):
    q, cache = attention_inputs(rng, shape, width, boundary)
    got = attend(kernels, shape, q, cache, boundary)
    causal = np.tri(width, dtype=bool)
    want = reference.attention(q, *cache.astype(np.float32), boundary, causal)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
    for i in (0, width // 2, width - 1):
        alone = attend(kernels, shape, q[i : i + 1], cache, boundary + i, np.ones((1, 1), bool))
        assert np.array_equal(alone[0], got[i])


@pytest.mark.gpu
@pytest.mark.parametrize("boundary", [0, 31, 300])
@pytest.mark.parametrize("shape", ATTENTIONS)
def test_a_row_s_attention_depends_on_what_it_sees_alone(kernels, rng, shape, boundary):
    """Bit for bit, beside rows that are no numbers, and in every width."""
    widest = max(MASKED_WIDTHS)
    q, cache = attention_inputs(rng, shape, widest, boundary)
    for width in MASKED_WIDTHS[:-1]:
        seen = (rng.random((width, width)) < 0.4) | np.eye(width, dtype=bool)
        alone = attend(kernels, shape, q[:width], cache, boundary, seen)
        beside, rubbish = q.copy(), cache.copy()
        beside[width:] = np.nan
        rubbish[:, :, boundary + width :] = np.nan
        every = np.eye(widest, dtype=bool)
        every[:width, :width] = seen
        every[width:, :width] = rng.random((widest - width, width)) < 0.5
        together = attend(kernels, shape, beside, rubbish, boundary, every)
        assert np.isfinite(alone).all()
        assert np.array_equal(alone, together[:width])


@pytest.mark.gpu
@pytest.mark.parametrize(("vocab", "size"), HEADS)
def test_logits_and_that_a_row_s_do_not_depend_on_the_others(kernels, rng, vocab, size):
    table, x = bf16_bits(normal(rng, vocab, size)), normal(rng, max(HEAD_ROWS), size)
    single = np.concatenate([logits_of(kernels, table, x[i : i + 1]) for i in range(len(x))])
    np.testing.assert_allclose(single, reference.head(x, table), rtol=1e-4, atol=size * 1e-6)
    for rows in HEAD_ROWS:
        assert np.array_equal(logits_of(kernels, table, x[:rows]), single[:rows])


@pytest.mark.gpu
@pytest.mark.parametrize("rows", HEAD_ROWS)
@pytest.mark.parametrize(("vocab", "size"), HEADS)
def test_a_single_one_in_the_table_gives_an_activation_back(kernels, rng, vocab, size, rows):
    """Bit for bit, whatever a kernel makes of a float32 on its way."""
    x = (normal(rng, rows, size) * 10.0 ** rng.integers(-20, 21, (rows, 1))).astype(np.float32)
    columns = np.arange(vocab) * 7 % size
    table = np.zeros((vocab, size), np.uint16)
    table[np.arange(vocab), columns] = bf16_bits(np.ones(1, np.float32))
    assert np.array_equal(logits_of(kernels, table, x), x[:, columns])


def logits_of(kernels, table, x, asked=None):
    vocab, size = table.shape
    asked = np.arange(len(x), dtype=np.int32) if asked is None else asked
    item = kernel("head", vocab, size, rows=len(x))
    return kernels.run(item, [x, table, asked, nothing(len(x), vocab)])[-1]


@pytest.mark.gpu
def test_rows_that_do_not_ask_get_no_logits(kernels, rng):
    vocab, size = HEADS[0]
    table, x = bf16_bits(normal(rng, vocab, size)), normal(rng, 16, size)
    asked = np.full(16, -1, np.int32)
    asked[5] = 0
    got = logits_of(kernels, table, x, asked)
    np.testing.assert_allclose(got[5], reference.head(x, table)[5], rtol=1e-4, atol=1e-3)
    assert np.isnan(got[8:]).all()


@pytest.mark.gpu
@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_greedy(kernels, rng, vocab):
    logits = np.round(normal(rng, 8, vocab) * 2) / 2
    logits[1] = -np.inf
    logits[2, vocab // 2], logits[2, 0] = np.nan, np.inf
    logits[3] = np.nan
    logits[5] = np.finfo(np.float32).min
    logits[6, vocab - 1] = np.inf
    logits[7], logits[7, vocab - 1] = -np.inf, -5
    asked = np.arange(8, dtype=np.int32)
    asked[4] = -1
    item = kernel("greedy", vocab, rows=8)
    got = kernels.run(item, [logits, asked, np.full(8, 77, np.int32)])[-1]
    assert got.tolist() == [int(logits[0].argmax()), -1, -1, -1, -1, -1, vocab - 1, vocab - 1]
