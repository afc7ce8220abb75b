"""`softmax_parts` and `choose`: the twin, the definition as it stands, and the processor's rule."""

from functools import cache

import cpu_kernels
import numpy as np
import pytest
import tvm
from choose_cases import (
    OPTIONS,
    Case,
    check,
    damaged,
    random_case,
    state_for,
)

from bitmtp_tvm import reference
from bitmtp_tvm.reference.choose import scores
from bitmtp_tvm.sampling import SamplingOptions
from bitmtp_tvm.specialize import bind_dims
from relax_models import choose_ops
from relax_models.state import NEVER

FORMS = ["definition", "rule"]
ROWS, TARGETS, VOCAB = 6, 5, 600


@cache
def built(form, op, vocab_size, rows):
    func = getattr(choose_ops, op)(vocab_size)
    if form == "rule":
        return cpu_kernels.build(cpu_kernels.scheduled(func, rows=rows))
    return cpu_kernels.build(bind_dims(func, {"rows": rows}))


def call(form, op, case, inputs, *dtypes):
    """Results of an operation, which start out as rubbish."""
    rows, vocab_size = case.logits.shape
    shape = (rows, choose_ops.parts_of(vocab_size)) if op == "softmax_parts" else (rows,)
    arrays = [*case.arguments, *inputs, *(np.full(shape, 77, dtype) for dtype in dtypes)]
    tensors = [tvm.runtime.tensor(np.ascontiguousarray(array)) for array in arrays]
    built(form, op, vocab_size, rows)["main"](*tensors)
    return [tensor.numpy() for tensor in tensors[-len(dtypes) :]]


def parts_of(form, case):
    return call(form, "softmax_parts", case, [], np.float32, np.int32, np.float32)


def choice_of(form, case):
    """Token, confidence and logprob."""
    return call(form, "choose", case, parts_of(form, case), np.int32, np.float32, np.float32)


def assert_equal(got, want):
    for a, b in zip(got, want, strict=True):
        assert np.array_equal(a, b)


# ---- the twin ----


@pytest.mark.parametrize(
    ("counter", "key", "want"),
    [
        ("00000000 00000000 00000000 00000000", "00000000 00000000",
         "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff",
         "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0",
         "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)  # fmt: skip
def test_philox_gives_the_known_answers_of_its_authors(counter, key, want):
    counter, key, want = (
        np.array([int(word, 16) for word in text.split()], np.uint32)
        for text in (counter, key, want)
    )
    assert np.array_equal(reference.philox4x32(counter, key), want)
    many = np.stack([np.zeros(4, np.uint32), counter])
    assert np.array_equal(reference.philox4x32(many, key)[1], want)


def test_the_noise_is_finite_at_both_ends_of_its_words():
    ends = np.array([0, 2**32 - 1], np.uint32)
    u = ((ends >> np.uint32(9)).astype(np.float32) + np.float32(0.5)) * np.float32(2**-23)
    assert u.tolist() == [2**-24, 1 - 2**-24]
    noise = -np.log(-np.log(u))
    assert noise.dtype == np.float32 and noise[1] < 16.65 and noise[0] > -2.82


def test_the_twin_filters_by_hand():
    z = np.log(np.array([0.1, 0.4, 0.1, 0.2, 0.2], np.float32))
    for options, want in [
        (SamplingOptions(1.0), [0, 1, 2, 3, 4]),
        (SamplingOptions(1.0, top_k=1), [1]),
        # The second and the third are equal, and so are the last two.
        (SamplingOptions(1.0, top_k=2), [1, 3, 4]),
        (SamplingOptions(1.0, top_k=4), [0, 1, 2, 3, 4]),
        (SamplingOptions(1.0, top_p=0.3), [1]),
        (SamplingOptions(1.0, top_p=0.5), [1, 3, 4]),
        (SamplingOptions(1.0, top_p=0.79), [1, 3, 4]),
        (SamplingOptions(1.0, top_p=0.81), [0, 1, 2, 3, 4]),
        # Half of the 0.8 that top_k leaves is what the first has alone.
        (SamplingOptions(1.0, top_k=2, top_p=0.49), [1]),
        (SamplingOptions(1.0, min_p=0.49), [1, 3, 4]),
        (SamplingOptions(1.0, min_p=1.0), [1]),
        # At temperature 1/2 a fourth and a sixteenth of the likeliest.
        (SamplingOptions(0.5, min_p=0.24), [1, 3, 4]),
        (SamplingOptions(0.5, min_p=0.26), [1]),
    ]:
        score = scores(z, 3, state_for(options, 1))
        assert np.flatnonzero(score > -np.inf).tolist() == want, options


# ---- the kernels ----


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", OPTIONS)
def test_a_choice_is_the_twin_s(rng, name, form):
    differing = 0
    for _ in range(3):
        case = random_case(rng, ROWS, VOCAB, OPTIONS[name], TARGETS)
        differing += check(case, *choice_of(form, case))
        case = damaged(rng, case)
        chosen = choice_of(form, case)
        differing += check(case, *chosen)
        assert chosen[0][:4].tolist() == [-1] * 4
        assert not chosen[1][:4].any() and not chosen[2][:4].any()
    assert differing <= 1


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("penalty", [1.0, 1.3])
def test_parts_are_the_twin_s(rng, penalty, form):
    options = SamplingOptions(repetition_penalty=penalty)
    case = damaged(rng, random_case(rng, ROWS, VOCAB, options, TARGETS))
    case.logits[4, :256] = -np.inf
    top, best, total = parts_of(form, case)
    want = reference.softmax_parts(*case.arguments, choose_ops.PART)
    asks = case.logit_rows >= 0
    assert np.array_equal(top[asks], want[0][asks]) and np.array_equal(best[asks], want[1][asks])
    np.testing.assert_allclose(total[asks], want[2][asks], rtol=1e-5)
    assert (top[4, 0], best[4, 0], total[4, 0]) == (-np.inf, -1, 0)
    assert (top[1, -1], best[1, -1], total[1, -1]) == (np.inf, -1, 0)
    if form == "rule":
        # Nobody has touched the row that asks for nothing.
        assert (top[3] == 77).all() and (best[3] == 77).all() and (total[3] == 77).all()


@pytest.mark.parametrize("name", ["greedy", "temperature", "top_p", "everything"])
@pytest.mark.parametrize(("vocab_size", "rows"), [(12, 64), (8205, ROWS)])
def test_other_vocabularies(rng, vocab_size, rows, name):
    case = random_case(rng, rows, vocab_size, OPTIONS[name], TARGETS)
    chosen = choice_of("rule", case)
    assert check(case, *chosen) == 0
    assert ((chosen[0] >= 0) & (chosen[0] < vocab_size)).all()
    # The last token alone, in a block of random bits that the vocabulary does not fill.
    case.logits[:, :-1] = -np.inf
    token, confidence, logprob = choice_of("rule", case)
    assert (token == vocab_size - 1).all()
    assert (confidence == 1).all() and (logprob == 0).all()


@pytest.mark.parametrize("form", FORMS)
def test_greedy_takes_the_lowest_of_equals_in_and_across_parts(form):
    logits = np.zeros((ROWS, VOCAB), np.float32)
    logits[1, [300, 270, 599]] = 2
    logits[2, [599, 255, 256]] = -0.0
    logits[2, logits[2] != 0] = -5
    case = Case(
        logits,
        np.arange(ROWS, dtype=np.int32),
        np.zeros(ROWS, np.int32),
        state_for(SamplingOptions(), TARGETS),
        np.full(VOCAB, NEVER, np.int32),
    )
    case.logits[2, :255] = -5
    token, confidence, _ = choice_of(form, case)
    assert token[:3].tolist() == [0, 270, 255]
    assert confidence[0] == pytest.approx(1 / VOCAB, rel=1e-6)


@pytest.mark.parametrize("form", FORMS)
def test_mask_rows_are_never_sampled(rng, form):
    case = random_case(rng, ROWS, VOCAB, SamplingOptions(1000.0), 1)
    token, confidence, logprob = choice_of(form, case)
    assert token[0] != case.logits[0].argmax()
    assert np.array_equal(token[1:], case.logits[1:].argmax(axis=1))
    np.testing.assert_allclose(np.exp(logprob[1:]), confidence[1:], rtol=1e-5)


@pytest.mark.parametrize("form", FORMS)
def test_a_penalty_is_for_tokens_before_the_horizon(form):
    """The same row at four positions: both of its high tokens are seen, at 10 and at 20."""
    logits = np.full((ROWS, VOCAB), -9, np.float32)
    logits[:, 17], logits[:, 400], logits[:, 500] = 6, 5, 4
    seen = np.full(VOCAB, NEVER, np.int32)
    seen[17], seen[400] = 10, 20
    case = Case(
        logits,
        np.arange(ROWS, dtype=np.int32),
        np.array([9, 10, 11, 20, 21, 21], np.int32),
        state_for(SamplingOptions(repetition_penalty=2.0), TARGETS),
        seen,
    )
    token, _, logprob = choice_of(form, case)
    assert token.tolist() == [17, 17, 400, 400, 500, 500]
    z = np.full(VOCAB, -9.0)
    z[[17, 400, 500]] = 3, 2.5, 4
    assert logprob[4] == pytest.approx(4 - np.log(np.exp(z).sum()), rel=1e-5)
    # A negative logit is multiplied, and `seen` alone changes nothing.
    case.seen[:] = np.where(case.seen == NEVER, 0, NEVER)
    case.logits[:] = -np.abs(case.logits)
    assert (choice_of(form, case)[0] == 400).all()
    case.state[:] = state_for(SamplingOptions(), TARGETS)
    assert (choice_of(form, case)[0] == 500).all()


@pytest.mark.parametrize("name", ["temperature", "everything"])
def test_a_draw_depends_on_seed_and_position_alone(rng, name):
    """Bit for bit, in every row of every bucket, beside rows that are no numbers."""
    case = random_case(rng, 64, VOCAB, OPTIONS[name], 64)
    together = choice_of("rule", case)
    for rows in (1, ROWS):
        for first in range(0, 64 - rows, 7):
            alone = choice_of("rule", case.rows(slice(first, first + rows)))
            assert_equal(alone, [array[first : first + rows] for array in together])
    case.logits[1::2] = np.nan
    assert_equal(
        [array[::2] for array in choice_of("rule", case)], [array[::2] for array in together]
    )


def test_other_seeds_and_positions_draw_other_tokens():
    logits = np.zeros((64, VOCAB), np.float32)
    position = np.arange(64, dtype=np.int32)
    seen = np.full(VOCAB, NEVER, np.int32)
    drawn = [
        choice_of(
            "rule",
            Case(logits, position, position, state_for(SamplingOptions(1.0), 64, seed), seen),
        )[0]
        for seed in (7, 8, 7 + 2**32, 7 + 2**63)
    ]
    # Of 64 draws out of 600 tokens a few are equal by chance.
    assert all(len(set(tokens.tolist())) > 50 for tokens in drawn)
    for i in range(4):
        for j in range(i):
            assert (drawn[i] == drawn[j]).sum() <= 2


# ---- the distribution ----

SMALL = np.array([2.0, 1.5, 1.5, 1.0, 0.5, 0.0, 0.0, -0.5, -1.0, -2.0, -3.0, -np.inf], np.float32)


def draws(options, count=20032):
    """Tokens at positions 0, 1, … of the compiled kernel."""
    position = np.arange(count, dtype=np.int32).reshape(-1, 64)
    state, seen = state_for(options, 64, seed=11), np.full(12, NEVER, np.int32)
    logits, asked = np.tile(SMALL, (64, 1)), np.arange(64, dtype=np.int32)
    tokens = [choice_of("rule", Case(logits, asked, p, state, seen))[0] for p in position]
    return np.concatenate(tokens)


def probabilities(options):
    """Straight from the definition, one token at a time: `SMALL` stands in descending order."""
    weight = np.exp(SMALL.astype(np.float64) / options.temperature)
    if options.top_k:
        weight[SMALL < SMALL[options.top_k - 1]] = 0
    share = weight / weight.sum()
    if options.top_p < 1:
        above = np.array([share[SMALL > z].sum() for z in SMALL])
        weight[above >= options.top_p] = 0
    weight[weight < options.min_p * weight[0]] = 0
    return weight / weight.sum()


def chi_square(counts, expected):
    """Σ (counted - expected)² / expected over five standard deviations of it above its mean."""
    possible = expected > 0
    assert not counts[~possible].any()
    freedom = possible.sum() - 1
    statistic = ((counts - expected)[possible] ** 2 / expected[possible]).sum()
    return statistic, freedom + 5 * np.sqrt(2 * freedom)


@pytest.mark.parametrize(
    "options",
    [
        SamplingOptions(1.0),
        SamplingOptions(0.5),
        SamplingOptions(3.0),
        SamplingOptions(1.0, top_k=3),
        SamplingOptions(2.0, top_k=6),
        SamplingOptions(1.0, top_p=0.6),
        SamplingOptions(1.5, top_p=0.95),
        SamplingOptions(1.0, min_p=0.2),
        SamplingOptions(1.2, top_k=8, top_p=0.9, min_p=0.05),
    ],
)
def test_draws_follow_the_distribution(options):
    tokens = draws(options)
    share = probabilities(options)
    statistic, most = chi_square(np.bincount(tokens, minlength=12), share * len(tokens))
    assert statistic < most


def test_neighbouring_positions_are_independent():
    options = SamplingOptions(2.0, top_k=4)
    tokens, share = draws(options), probabilities(options)
    for distance in (1, 4, 64):
        pairs = tokens[:-distance] * 12 + tokens[distance:]
        expected = np.outer(share, share).reshape(-1) * len(pairs)
        statistic, most = chi_square(np.bincount(pairs, minlength=144), expected)
        assert statistic < most
