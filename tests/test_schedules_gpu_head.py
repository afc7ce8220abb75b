"""The bounded head's kernels on the GPU, against the twin."""

from dataclasses import replace
from itertools import product

import gpu_kernels
import head_cases
import numpy as np
import pytest
from gpu_kernels import BOUNDED_HEADS, BOUNDED_ROWS, EPS, bounded_head, kernel, nothing
from numpy.testing import assert_array_equal

from bitmtp_tvm import reference
from bitmtp_tvm.reference import head_bound
from bitmtp_tvm.reference.choose import penalised
from bitmtp_tvm.reference.head_bound import (
    activation_codes,
    bound,
    candidates,
    code_head,
    plain_request,
)
from relax_models.bounded_head import LEAST_FLOOR, LOW_CODES, pack_codes
from relax_models.formats import bf16_to_float32, padded_k

ARCHES = ("sm_86", "sm_87", "sm_90a")
WIDTHS = (16, 33, 48, 64)
REAL = (128256, 2560)


@pytest.mark.parametrize("arch", ARCHES)
def test_kernels_of_the_real_shape_compile_without_spills(arch):
    from bitmtp_tvm.cubin import find_cubins
    from bitmtp_tvm.nvrtc import compile_cubin
    from bitmtp_tvm.overlap import overlaps, with_waits

    wanted = [k for rows in WIDTHS for k in bounded_head(*REAL, True, rows)]
    text = gpu_kernels.cuda_text(wanted, gpu_kernels.target_for(arch))
    (found,) = find_cubins(compile_cubin(with_waits(text) if overlaps(arch) else text, arch)[0])
    assert len(found.kernels) == len(wanted)
    assert {k.name: k.stack_bytes for k in found.kernels if k.stack_bytes} == {}
    assert max(k.shared_bytes for k in found.kernels) <= 48 * 1024
    narrow = [k for k in found.kernels if k.name.endswith("rows_16_kernel")]
    assert max(k.shared_bytes for k in narrow) <= 1024
    assert len(narrow) == 3 and max(k.registers for k in narrow) <= 128


def test_the_first_codes_are_loaded_in_front_of_the_wait():
    from schedules.gpu.head_codes_tile import choose_tile

    tile = choose_tile(8)
    text = gpu_kernels.cuda_text(
        [kernel("head_codes", *REAL, False, rows=8)], gpu_kernels.target_for("sm_90a")
    )
    body = text[text.index('extern "C" __global__') :]
    before = body[: body.index("griddepcontrol_wait")]
    assert before.count("ld_vec_weak_global") == tile.row_tiles * tile.ahead == 16
    assert "launch_dependents" in before
    assert not [name for name in ("q_ptr[", "spread_ptr[", "logit_rows_ptr[") if name in before]


def test_up_to_64_rows_see_the_table_together():
    from schedules.gpu.head_codes_tile import candidates, choose_tile, problem

    for rows in range(1, 200):
        tile = choose_tile(rows)
        assert problem(tile) == ""
        assert bool(tile.stages) == (tile.token_tiles > 4)
        assert -(-rows // (8 * tile.token_tiles)) == -(-rows // 64)
        if rows % 8 == 1:
            assert tile in candidates(rows)
            assert not [other for other in candidates(rows) if problem(other)]


def test_a_tile_that_does_not_fit_is_refused():
    from schedules.gpu.head_codes import code_head
    from schedules.gpu.head_codes_tile import choose_tile
    from schedules.workload import read

    work = read(gpu_kernels.definition(kernel("head_codes", 131, 77, False, rows=64)))
    for wrong in (
        {"warps": 0},
        {"warps": 24},
        {"ahead": 8},
        {"stages": 1},
        {"stages": 4},
        {"row_tiles": 5},
        {"token_tiles": 9, "stages": 2},
    ):
        with pytest.raises(ValueError, match="CodeTile"):
            code_head(work, replace(choose_tile(64), **wrong), waits=False)


def run_norm(kernels, x, weight, asked):
    rows, size = len(asked), x.shape[1]
    item = kernel("final_norm_codes", size, EPS, width=rows, rows=rows)
    out = [nothing(rows, size), np.full((rows, 2, padded_k(size)), 99, np.int8)]
    out += [nothing(rows, 3), np.zeros(rows, np.int32)]
    return kernels.run(item, [x, weight, asked, *out])[3:]


def run_head(kernels, normed, q, spread, floor, case, request, asked, penalty):
    """8-bit logits, floor and final logits of rows that were normed."""
    (vocab, size), rows = case.table.shape, len(normed)
    codes, bounds = pack_codes(case.table)
    some = [request.horizon[:rows], request.state, request.seen] if penalty else []
    item = kernel("head_codes", vocab, size, penalty, rows=rows)
    arguments = [q, spread, codes, bounds, asked, *some, floor, nothing(rows, vocab)]
    *_, floor, coded = kernels.run(item, arguments)
    item = kernel("head_rescore", vocab, size, penalty, rows=rows)
    arguments = [normed, case.table, spread, bounds, asked, *some, floor, coded]
    return coded, floor, kernels.run(item, arguments)[-1]


def whole(kernels, case, normed, coded, penalty, request):
    """All logits in 16 bit, by the tree of the candidates: none is below this floor."""
    (vocab, size), rows = case.table.shape, len(normed)
    floor, spread = np.full(rows, LEAST_FLOOR, np.int32), np.zeros((rows, 3), np.float32)
    bounds, asked = pack_codes(case.table)[1], np.arange(rows, dtype=np.int32)
    some = [request.horizon[:rows], request.state, request.seen] if penalty else []
    item = kernel("head_rescore", vocab, size, penalty, rows=rows)
    return kernels.run(item, [normed, case.table, spread, bounds, asked, *some, floor, coded])[-1]


@pytest.mark.gpu
@pytest.mark.parametrize("size", sorted({size for _, size, _ in BOUNDED_HEADS}))
def test_the_norm_and_its_codes(kernels, rng, size):
    x, weight = head_cases.rows_of(rng, size), rng.uniform(0.5, 2, size).astype(np.float32)
    asked = np.arange(16, dtype=np.int32)[::-1].copy()
    normed, q, spread, floor = run_norm(kernels, x, weight, asked)
    want = head_bound.final_norm_codes(x[::-1], weight, EPS)
    np.testing.assert_allclose(normed, want[0], rtol=1e-5, atol=1e-30)
    codes, scales = activation_codes(normed)
    assert_array_equal(q, codes)
    assert_array_equal(spread[:, 0], scales[:, 0])
    np.testing.assert_allclose(spread, scales, rtol=1e-5)
    assert (floor == LEAST_FLOOR).all()
    # Codes tell the activations up to half of one.
    told = q[:, 0, :size] * float(LOW_CODES) + q[:, 1, :size]
    assert np.abs(told * spread[:, :1] - normed).max(axis=1).tolist() <= (
        (spread[:, 0] * 0.506).tolist()
    )
    for rows in BOUNDED_ROWS[:-3]:
        some = run_norm(kernels, x[:rows], weight, np.arange(rows, dtype=np.int32))
        every = run_norm(kernels, x, weight, np.arange(16, dtype=np.int32))
        assert all(np.array_equal(a, b[:rows]) for a, b in zip(some, every, strict=True))


KINDS = ("plain", "duplicates", "column", "row", "neighbours", "equal", "zeros", "tiny", "huge")


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("shape", "kind"), [*product(BOUNDED_HEADS[:2], KINDS), (BOUNDED_HEADS[2], "plain")]
)
def test_logits_and_the_argmax(kernels, rng, shape, kind):
    vocab, size, penalty = shape
    case = head_cases.cases(rng, vocab, size)[kind]
    codes, bounds = pack_codes(case.table)
    requests = head_cases.requests(rng, vocab)
    asked = np.arange(head_cases.ROWS, dtype=np.int32)
    ones = np.ones(size, np.float32)
    normed, q, spread, floor = run_norm(kernels, case.x, ones, asked)
    exact = normed.astype(np.float64) @ bf16_to_float32(case.table).astype(np.float64).T
    for request in requests.values() if penalty else [requests["plain"]]:
        arguments = (case, request, asked, penalty)
        coded, low, logits = run_head(kernels, normed, q, spread, floor, *arguments)
        want, want_low = code_head(q, spread, codes, bounds, size, request)
        assert_array_equal(coded, want)
        assert_array_equal(low, want_low)
        assert (np.abs(exact - coded) <= bound(spread, bounds, vocab)).all()
        chosen = candidates(coded, spread, bounds, low, request)
        assert_array_equal(logits[~chosen], coded[~chosen])
        atol = 1e-5 * np.abs(exact).max()
        np.testing.assert_allclose(logits[chosen], exact[chosen], rtol=1e-4, atol=atol)
        every = whole(kernels, case, normed, coded, penalty, request)
        for row in range(head_cases.ROWS):
            mine, all16 = (
                penalised(z[row], int(request.horizon[row]), request.state, request.seen)
                for z in (logits, every)
            )
            assert mine.argmax() == all16.argmax() and mine.max() == all16.max()


@pytest.mark.gpu
@pytest.mark.parametrize("shape", BOUNDED_HEADS)
def test_a_row_s_logits_do_not_depend_on_the_others(kernels, rng, shape):
    vocab, size, penalty = shape
    case = head_cases.cases(rng, vocab, size)["duplicates"]
    case.x = np.concatenate([case.x, rng.normal(size=(48, size)).astype(np.float32)])
    requests = head_cases.requests(rng, vocab)
    request = requests["penalty"] if penalty else plain_request(64, vocab)
    request = type(request)(np.resize(request.horizon, 64), request.state, request.seen)
    ones, results = np.ones(size, np.float32), {}
    for rows in BOUNDED_ROWS:
        asked = np.arange(rows, dtype=np.int32)
        coded = run_norm(kernels, case.x[:rows], ones, asked)
        results[rows] = run_head(kernels, *coded, case, request, asked, penalty)
    for rows, some in results.items():
        for one, every in zip(some, results[64], strict=True):
            assert_array_equal(one, every[:rows])


@pytest.mark.gpu
def test_rows_that_do_not_ask_and_rows_that_are_broken(kernels, rng):
    vocab, size, _ = BOUNDED_HEADS[1]
    case = head_cases.cases(rng, vocab, size)["plain"]
    case.x[8, 3], case.x[9, 5] = np.nan, np.inf
    asked = np.arange(16, dtype=np.int32)
    asked[::2] = -1
    asked[8] = 8
    coded = run_norm(kernels, case.x, np.ones(size, np.float32), asked)
    request = plain_request(16, vocab)
    _, floor, logits = run_head(kernels, *coded, case, request, asked, False)
    assert np.isnan(logits[asked < 0]).all() and (floor[asked < 0] == LEAST_FLOOR).all()
    assert np.isnan(logits[8:10]).all()
    good = [1, 3, 5, 7, 11, 13, 15]
    np.testing.assert_allclose(
        logits[good], reference.head(coded[0][good], case.table), rtol=0.1, atol=0.05
    )
