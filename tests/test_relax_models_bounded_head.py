"""The 8-bit table, its bound, and the head's definition, against numpy."""

import head_cases
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_array_equal

from bitmtp_tvm import reference
from bitmtp_tvm.reference import head_bound
from bitmtp_tvm.reference.choose import penalised
from bitmtp_tvm.reference.head_bound import (
    Request,
    activation_codes,
    bound,
    candidates,
    code_head,
    key,
    plain_request,
)
from relax_models import bounded_head
from relax_models.bounded_head import (
    ERROR,
    LENGTH,
    SCALE,
    bounds_shape,
    codes_shape,
    most_code,
    pack_codes,
    unpack_codes,
)
from relax_models.formats import bf16_bits, bf16_to_float32

KINDS = ("plain", "duplicates", "column", "row", "neighbours", "equal", "zeros", "tiny", "huge")


@pytest.fixture
def rng():
    return np.random.default_rng(11)


def test_the_example_of_the_layout():
    row = np.array([[127, -127, 1, 2, 64, 0, 0, -1]], np.float32)
    codes, bounds = pack_codes(bf16_bits(row))
    assert codes.shape == codes_shape(1, 8) == (1, 1, 4, 32, 4)
    assert codes[0, 0, 0, 0].tolist() == [0x0201817F, 0, 0xFF000040, 0]
    assert np.count_nonzero(codes) == 2
    assert bounds.shape == bounds_shape(1) == (3, 16) and not bounds[:, 1:].any()
    assert bounds[SCALE, 0] == 1 and 0 <= bounds[ERROR, 0] < 1e-20
    assert 1 <= bounds[LENGTH, 0] / np.sqrt(36360) < 1.001


@pytest.mark.parametrize("shape", [(1, 1), (37, 72), (100, 1408), (33, 130)])
def test_codes_are_the_nearest_and_lengths_are_theirs(rng, shape):
    table = bf16_bits(
        rng.normal(size=shape).astype(np.float32) * rng.uniform(1e-3, 9, (shape[0], 1))
    )
    codes, bounds = pack_codes(table)
    w, w8 = bf16_to_float32(table).astype(np.float64), unpack_codes(codes, *shape)
    scale = bounds[SCALE, : shape[0], None].astype(np.float64)
    assert np.abs(w8.astype(int)).max(axis=1).tolist() == [127] * shape[0]
    assert np.abs(w - scale * w8).max() <= scale.max() * 0.50001
    for row, exact in ((ERROR, w - scale * w8), (LENGTH, scale * w8)):
        length = np.linalg.norm(exact, axis=1)
        assert (length <= bounds[row, : shape[0]]).all()
        np.testing.assert_allclose(bounds[row, : shape[0]], length, rtol=1e-3, atol=1e-20)
    full = np.zeros(codes_shape(*shape), np.uint32)
    full[...] = codes
    assert_array_equal(unpack_codes(full, *shape), w8)
    assert np.unpackbits(codes.view(np.uint8)).sum() == np.unpackbits(w8.view(np.uint8)).sum()


def test_rows_that_are_not_finite_are_bounded_by_infinity():
    table = bf16_bits(np.array([[1, np.nan], [np.inf, 1], [0, 0], [1, 2]], np.float32))
    codes, bounds = pack_codes(table)
    assert not unpack_codes(codes, 4, 2)[:3].any()
    assert bounds[SCALE, :3].tolist() == [0, 0, 0]
    assert np.isinf(bounds[ERROR, :2]).all() and np.isinf(bounds[LENGTH, :2]).all()
    assert (bounds[1:, 2] < 1e-20).all()


def test_other_arrays_are_refused():
    for wrong in (
        np.zeros((2, 2), np.float32),
        np.zeros(4, np.uint16),
        np.zeros((0, 4), np.uint16),
    ):
        with pytest.raises(ValueError, match="uint16 table"):
            pack_codes(wrong)
    with pytest.raises(ValueError, match="expected uint32"):
        unpack_codes(np.zeros((1, 1, 4, 32, 3), np.uint32), 1, 8)


def test_large_tables_alone_and_on_cuda_alone_have_codes():
    assert bounded_head.pays("cuda", 128256, 2560) and not bounded_head.pays("llvm", 128256, 2560)
    assert not bounded_head.pays("cuda", 8192, 512)


def test_sums_of_codes_fit_int32():
    for k in (1, 64, 512, 2560, 4096, 20000):
        largest = most_code(k) + bounded_head.LOW_CODES // 2
        assert k * 127 * most_code(k) < 2**31
        assert largest < 128 * bounded_head.LOW_CODES


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 300), st.floats(-4, 4), st.floats(0, 5))
def test_no_logit_is_further_off_than_its_bound(seed, size, magnitude, outlier):
    rng = np.random.default_rng(seed)
    x, w = rng.standard_t(3, (4, size)), rng.standard_t(3, (50, size))
    x[:2, rng.integers(size)] *= 10**outlier
    w[:9, rng.integers(size)] *= 10**outlier
    # Along the errors themselves the inequality is tight.
    table = bf16_bits((w * 10**magnitude).astype(np.float32))
    w = bf16_to_float32(table).astype(np.float64)
    codes, bounds = pack_codes(table)
    x[3] = w[0] - bounds[SCALE, 0] * unpack_codes(codes, 50, size)[0].astype(np.float64)
    x = x.astype(np.float32)
    q, spread = activation_codes(x)
    logits, _ = code_head(q, spread, codes, bounds, size, plain_request(4, 50))
    error = np.abs(x.astype(np.float64) @ w.T - logits)
    most = bound(spread, bounds, 50)
    assert (error <= most).all()
    # No row counts as shorter than the least length, not even one of zeros.
    longest = np.linalg.norm(x, axis=1) + 2 * bounded_head.LEAST_LENGTH
    assert (most <= longest[:, None] * np.linalg.norm(w, axis=1) + 1e-20).all()


@pytest.mark.parametrize("kind", KINDS)
def test_the_argmax_is_that_of_the_whole_table(rng, kind):
    case = head_cases.cases(rng, 301, 200)[kind]
    codes, bounds = pack_codes(case.table)
    exact = reference.head(case.x, case.table)
    for name, request in head_cases.requests(rng, 301).items():
        logits = head_bound.bounded_head(case.x, case.table, codes, bounds, request)
        for row in range(head_cases.ROWS):
            choose = [
                penalised(z[row], int(request.horizon[row]), request.state, request.seen)
                for z in (logits, exact)
            ]
            assert choose[0].argmax() == choose[1].argmax(), (name, row)
            assert choose[0].max() == choose[1].max()


def test_few_tokens_are_candidates_where_logits_differ(rng):
    case = head_cases.cases(rng, 3000, 512)["plain"]
    codes, bounds = pack_codes(case.table)
    q, spread = activation_codes(case.x)
    request = plain_request(head_cases.ROWS, 3000)
    logits, floor = code_head(q, spread, codes, bounds, 512, request)
    chosen = candidates(logits, spread, bounds, floor, request).sum(axis=1)
    # Every token of a row of zeros and of one near it; else those within two bounds of the largest.
    assert chosen[1] == chosen[3] == 3000
    assert np.delete(chosen, [1, 3]).max() < 60 and chosen.min() >= 1


def test_keys_order_as_floats_do():
    values = np.array([-np.inf, -3e38, -1, -1e-40, -0.0, 0.0, 1e-40, 1, np.inf], np.float32)
    assert (np.diff(key(values)) > 0).all()


def test_what_is_not_finite_is_a_candidate():
    logits = np.array([[5, 1, np.nan, np.inf, -np.inf]], np.float32)
    spread, bounds = np.zeros((1, 3), np.float32), np.zeros((3, 16), np.float32)
    floor = key(np.array([5], np.float32))
    chosen = candidates(logits, spread, bounds, floor, plain_request(1, 5))
    assert chosen.tolist() == [[True, False, True, True, True]]


@pytest.mark.parametrize("penalty", [False, True])
def test_the_operations_as_written(rng, penalty):
    """The plain loops of `head_ops`, on the processor, against the twin."""
    from cpu_kernels import run

    from bitmtp_tvm.specialize import bind_dims
    from relax_models import head_ops

    rows, vocab, size = head_cases.ROWS, 35, 40
    case = head_cases.cases(rng, vocab, size)["duplicates"]
    every = head_cases.requests(rng, vocab)
    request: Request = every["penalty"] if penalty else every["plain"]
    codes, bounds = pack_codes(case.table)
    asked = np.arange(rows, dtype=np.int32)
    asked[7] = -1
    weight = rng.uniform(0.5, 2, size).astype(np.float32)
    norm = bind_dims(head_ops.final_norm_codes(size, 1e-5), {"width": rows, "rows": rows})
    out = [np.zeros((rows, size), np.float32), np.zeros((rows, 2, 128), np.int8)]
    out += [np.zeros((rows, 3), np.float32), np.zeros(rows, np.int32)]
    normed, q, spread, floor = run(norm, [case.x, weight, asked, *out])[3:]
    expected = head_bound.final_norm_codes(case.x, weight, 1e-5)
    kept = asked >= 0
    apart = (q.astype(int) - expected[1])[kept]
    assert np.abs(apart[:, 0] * bounded_head.LOW_CODES + apart[:, 1]).max() <= 1
    np.testing.assert_allclose(spread[kept], expected[2][kept], rtol=1e-5)
    given_ = [request.horizon, request.state, request.seen] if penalty else []
    head = bind_dims(head_ops.head_codes(vocab, size, penalty), {"rows": rows})
    nothing = np.full((rows, vocab), np.nan, np.float32)
    *_, floor, logits = run(head, [q, spread, codes, bounds, asked, *given_, floor, nothing])
    want, want_floor = code_head(q, spread, codes, bounds, size, request)
    assert_array_equal(logits[kept], want[kept])
    assert_array_equal(floor[kept], want_floor[kept])
    rescore = bind_dims(head_ops.head_rescore(vocab, size, penalty), {"rows": rows})
    arguments = [normed, case.table, spread, bounds, asked, *given_, floor, logits]
    exact = run(rescore, arguments)[-1]
    chosen = candidates(want, spread, bounds, want_floor, request)
    expected = np.where(chosen, reference.head(normed, case.table), want)
    np.testing.assert_allclose(exact[kept], expected[kept], rtol=1e-4, atol=1e-6)
    assert_array_equal((exact == want)[kept][~chosen[kept]], True)
    assert np.isnan(exact[7]).all()
