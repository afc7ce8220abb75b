"""The processor's kernels against the numpy twin, at ragged shapes, and the same at every width."""

from dataclasses import replace

import numpy as np
import pytest
import tvm
from cpu_kernels import CPU, build, run, scheduled
from gpu_kernels import normal

from bitmtp_tvm import reference
from bitmtp_tvm.specialize import bind_dims
from bitmtp_tvm.targets import AARCH64, get_target, tvm_target
from relax_models import ops
from relax_models.formats import bf16_bits, pack, padded_k
from schedules import cpu, rule
from schedules.cpu.vector import group_for, lanes_for
from schedules.workload import read

WIDTHS = (1, 2, 3, 5, 8, 16, 64)
EPS = 1e-5


def quantized(rng, width, k):
    q = np.zeros((width, padded_k(k)), np.int8)
    q[:, :k] = rng.integers(-128, 128, (width, k))
    return q


def test_every_operation_has_a_rule_for_the_processor():
    defined = {
        "attention",
        "choose",
        "accept",
        "embed",
        "final_norm",
        "gated_norm_quantize",
        "gated_quantize",
        "greedy",
        "head",
        "low_bit_embed",
        "low_bit_linear",
        "norm_quantize",
        "qk_norm",
        "quantize",
        "rope_kv_write",
        "running",
        "softmax_parts",
        "step_rows",
    }
    assert set(cpu.RULES) == defined


def test_a_rule_keeps_signature_and_stamp():
    func = bind_dims(ops.norm_quantize(72, EPS), {"width": 3})
    made = rule.apply(func, CPU)
    assert read(made) == read(func)
    assert made.attrs["tirx.is_scheduled"]
    assert made.attrs["bitmtp.op"] == "norm_quantize"


def test_an_unknown_operation_has_no_schedule():
    func = bind_dims(ops.embed(16, 8), {"width": 1}).with_attr("bitmtp.op", "fly")
    assert rule.apply(func, CPU) is None


def test_symbolic_shapes_are_refused():
    with pytest.raises(ValueError, match="width is symbolic"):
        rule.apply(ops.embed(16, 8), CPU)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize(
    ("rows", "k"), [((512, 128, 128), 512), ((30, 7), 1408), ((64,), 100), ((5, 3, 1), 2560)]
)
def test_integer_sums_are_exact(rng, rows, k, width):
    n = sum(rows)
    codes = rng.integers(0, 3, (n, k)).astype(np.uint8)
    q = quantized(rng, width, k)
    one, none = np.ones(width, np.float32), np.zeros(width, np.int32)
    func = scheduled(ops.low_bit_linear(rows, k, "llvm", "bitnet-ternary"), width=width)
    scales, y = np.ones(len(rows), np.float32), np.full((width, n), np.nan, np.float32)
    got = run(func, [q, one, none, pack(codes, "llvm"), scales, y])[-1]
    assert np.array_equal(got, reference.low_bit_accumulate(q[:, :k], codes).astype(np.float32))


def test_the_largest_sums_do_not_overflow():
    k = 6912
    codes, q = np.full((8, k), 2, np.uint8), np.full((1, k), -128, np.int8)
    func = scheduled(ops.low_bit_linear((8,), k, "llvm", "bitnet-ternary"), width=1)
    one, none = np.ones(1, np.float32), np.zeros(1, np.int32)
    y = np.zeros((1, 8), np.float32)
    got = run(func, [q, one, none, pack(codes, "llvm"), one, y])[-1]
    assert np.array_equal(got, np.full((1, 8), -256 * k, np.float32))


@pytest.mark.parametrize("residual", [False, True])
def test_every_part_of_a_fused_matrix_keeps_its_scale(rng, residual):
    rows, k, width = (30, 6, 9), 200, 4
    n = sum(rows)
    codes, q = rng.integers(0, 3, (n, k)).astype(np.uint8), quantized(rng, width, k)
    scale, weight_scale = rng.random(width, np.float32), np.array([0.5, 3, 11], np.float32)
    total, added = q.sum(1, dtype=np.int32), normal(rng, width, n)
    linear = ops.low_bit_linear(rows, k, "llvm", "bitnet-ternary", residual)
    arguments = [q, scale, total, pack(codes, "llvm"), weight_scale]
    arguments += [added] if residual else []
    got = run(scheduled(linear, width=width), [*arguments, np.zeros_like(added)])[-1]
    want = reference.low_bit_linear(q[:, :k], scale, total, codes, weight_scale, rows)
    np.testing.assert_allclose(got, want + added if residual else want, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("size", [512, 1408, 2560, 30, 72])
@pytest.mark.parametrize("width", [1, 3, 16])
def test_norm_and_quantize(rng, size, width):
    x, weight = normal(rng, width, size), rng.uniform(0.5, 2, size).astype(np.float32)
    results = empty_quantized(width, size)
    got = run(scheduled(ops.norm_quantize(size, EPS), width=width), [x, weight, *results])[-3:]
    check_quantized(got, reference.quantize(reference.rms_norm(x, weight, EPS)))


@pytest.mark.parametrize("size", [1408, 6912, 100])
@pytest.mark.parametrize("width", [1, 5])
def test_gate_norm_and_quantize(rng, size, width):
    x, weight = normal(rng, width, 2 * size) * 9, rng.uniform(0.5, 2, size).astype(np.float32)
    func = scheduled(ops.gated_norm_quantize(size, EPS), width=width)
    got = run(func, [x, weight, *empty_quantized(width, size)])[-3:]
    want = reference.gated_norm_quantize(x[:, :size], x[:, size:], weight, EPS)
    check_quantized(got, want)


def empty_quantized(width, size):
    q = np.full((width, padded_k(size)), 99, np.int8)
    return [q, np.zeros(width, np.float32), np.zeros(width, np.int32)]


def check_quantized(got, want):
    """A value on the edge of two codes may fall to either side: the norms sum in another order."""
    difference = np.abs(got[0].astype(int) - want[0])
    assert difference.max() <= 1
    assert (difference > 0).mean() < 1e-3
    np.testing.assert_allclose(got[1], want[1], rtol=1e-5)
    assert np.array_equal(got[2], got[0].sum(1, dtype=np.int32))


def test_a_row_of_zeros_quantises_to_zeros():
    x, weight = np.zeros((2, 64), np.float32), np.ones(64, np.float32)
    func = scheduled(ops.norm_quantize(64, EPS), width=2)
    q, scale, total = run(func, [x, weight, *empty_quantized(2, 64)])[-3:]
    assert not q.any() and not total.any()
    np.testing.assert_allclose(scale, 1e-5 / 127, rtol=1e-6)


@pytest.mark.parametrize("head_dim", [12, 64])
def test_rope_and_kv_write(rng, head_dim):
    heads, kv_heads, slots, width, boundary, positions = 4, 2, 50, 5, 17, 90
    qkv = normal(rng, width, (heads + 2 * kv_heads) * head_dim)
    position = rng.integers(0, positions, width).astype(np.int32)
    table = normal(rng, positions, head_dim // 2, 2)
    before = normal(rng, 2, kv_heads, slots, head_dim).astype(np.float16)
    func = scheduled(ops.rope_kv_write(heads, kv_heads, head_dim, positions, slots), width=width)
    arguments = [qkv, position, np.array([boundary], np.int32), table, before]
    result = np.zeros((width, heads, head_dim), np.float32)
    *_, cache, q = run(func, [*arguments, result])
    rows = qkv.reshape(width, -1, head_dim)
    np.testing.assert_allclose(q, reference.rope(rows[:, :heads], position, table), atol=1e-5)
    keys = reference.rope(rows[:, heads : heads + kv_heads], position, table)
    want = before.copy()
    want[0, :, boundary : boundary + width] = keys.transpose(1, 0, 2)
    want[1, :, boundary : boundary + width] = rows[:, heads + kv_heads :].transpose(1, 0, 2)
    np.testing.assert_allclose(cache, want, atol=2e-3)
    assert np.array_equal(cache[:, :, :boundary], before[:, :, :boundary])
    assert np.array_equal(cache[:, :, boundary + width :], before[:, :, boundary + width :])


@pytest.mark.parametrize(("vocab", "size"), [(61, 72), (320, 512)])
@pytest.mark.parametrize("rows", [1, 5, 8])
def test_head_and_final_norm(rng, vocab, size, rows):
    table = bf16_bits(normal(rng, vocab, size))
    x, weight = normal(rng, rows, size), rng.uniform(0.5, 2, size).astype(np.float32)
    asked = np.arange(rows, dtype=np.int32)[::-1].copy()
    func = scheduled(ops.final_norm(size, EPS), width=rows, rows=rows)
    normed = run(func, [x, weight, asked, np.zeros_like(x)])[-1]
    want = reference.rms_norm(x, weight, EPS)[asked]
    np.testing.assert_allclose(normed, want, rtol=1e-5, atol=1e-6)
    func = scheduled(ops.head(vocab, size), rows=rows)
    logits = run(func, [normed, table, asked, np.zeros((rows, vocab), np.float32)])[-1]
    np.testing.assert_allclose(logits, reference.head(want, table), rtol=1e-4, atol=1e-4)


def test_rows_that_do_not_ask_get_no_logits(rng):
    rows, vocab, size = 8, 40, 16
    asked = np.array([3, -1, -1, -1, -1, -1, -1, -1], np.int32)
    x, table = normal(rng, rows, size), bf16_bits(normal(rng, vocab, size))
    func = scheduled(ops.final_norm(size, EPS), width=rows, rows=rows)
    normed = run(func, [x, np.ones(size, np.float32), asked, np.ones_like(x)])[-1]
    assert not normed[1:].any()
    untouched = np.full((rows, vocab), 5, np.float32)
    logits = run(scheduled(ops.head(vocab, size), rows=rows), [normed, table, asked, untouched])[-1]
    assert np.array_equal(logits[4:], untouched[4:])
    func = scheduled(ops.greedy(vocab), rows=rows)
    tokens = run(func, [logits, asked, np.zeros(rows, np.int32)])[-1]
    assert tokens.tolist() == [int(logits[0].argmax()), *[-1] * 7]


def test_greedy_takes_the_lowest_of_equals_and_refuses_what_is_no_number():
    logits = np.zeros((5, 30), np.float32)
    logits[0, [7, 20]] = 3
    logits[1] = -np.inf
    logits[2, 9], logits[2, 11] = np.nan, 5
    logits[3] = np.nan
    logits[4] = -1
    logits[4, 29] = np.inf
    rows = np.arange(5, dtype=np.int32)
    func = scheduled(ops.greedy(30), rows=5)
    assert run(func, [logits, rows, rows])[-1].tolist() == [7, -1, -1, -1, 29]


def test_embedding_rows(rng):
    table = bf16_bits(normal(rng, 31, 24))
    tokens = np.array([30, 0, 7], np.int32)
    got = run(scheduled(ops.embed(31, 24), width=3), [tokens, table, np.zeros((3, 24), np.float32)])
    assert np.array_equal(got[-1], reference.embed(tokens, table))


@pytest.mark.parametrize("size", [512, 72])
def test_a_row_is_the_same_in_every_width(rng, size):
    """Bit for bit: every float sum has one tree, whatever runs beside the row."""
    widest = max(WIDTHS)
    x, weight = normal(rng, widest, size), rng.uniform(0.5, 2, size).astype(np.float32)
    table = bf16_bits(normal(rng, 100, size))
    for width in WIDTHS[:-1]:
        rows = np.arange(width, dtype=np.int32)
        alone = run(
            scheduled(ops.norm_quantize(size, EPS), width=width),
            [x[:width], weight, *empty_quantized(width, size)],
        )[-3:]
        together = run(
            scheduled(ops.norm_quantize(size, EPS), width=widest),
            [x, weight, *empty_quantized(widest, size)],
        )[-3:]
        for a, b in zip(alone, together, strict=True):
            assert np.array_equal(a, b[:width])
        logits = np.zeros((widest, 100), np.float32)
        func = scheduled(ops.head(100, size), rows=width)
        alone = run(func, [x[:width], table, rows, logits[:width]])[-1]
        every = np.arange(widest, dtype=np.int32)
        together = run(scheduled(ops.head(100, size), rows=widest), [x, table, every, logits])[-1]
        assert np.array_equal(alone, together[:width])


def test_lanes_and_groups():
    assert [lanes_for(size) for size in (512, 72, 12, 30, 7)] == [16, 8, 4, 2, 1]
    assert [group_for(width) for width in (1, 2, 3, 5, 6, 7, 8, 64)] == [1, 2, 3, 1, 3, 1, 4, 4]


def test_aarch64_code_uses_the_8_bit_dot_product():
    target = tvm_target(replace(get_target("cpu"), host=AARCH64))
    func = bind_dims(ops.low_bit_linear((64,), 256, "llvm", "bitnet-ternary"), {"width": 4})
    made = rule.apply(func, target)
    text = build(made, target).inspect_source("asm")
    assert text.count("sdot") >= 8


def test_a_processor_without_the_dot_product_is_refused():
    target = tvm.target.Target({"kind": "llvm", "mtriple": "riscv64-linux-gnu"})
    func = bind_dims(ops.low_bit_linear((8,), 128, "llvm", "bitnet-ternary"), {"width": 1})
    with pytest.raises(ValueError, match="riscv64"):
        rule.apply(func, target)


def test_every_target_names_a_kind_with_rules():
    for name in ("cpu", "orin", "3090", "h20"):
        assert tvm_target(get_target(name)).kind.name in rule.RULES
