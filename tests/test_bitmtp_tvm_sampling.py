import dataclasses
import math

import numpy as np
import pytest

from bitmtp_tvm.errors import UsageError
from bitmtp_tvm.sampling import SamplingOptions
from relax_models.state import STATE_WORDS, Word

BAD = {
    "temperature": [-1.0, 0.005, 1e-30, 1001, math.nan, math.inf, True, "1", None],
    "top_k": [-1, 1.5, True, "5", None],
    "top_p": [0, -0.5, 1.1, math.nan, False, True, "0.9", None],
    "min_p": [-0.1, 1.01, math.nan, True, "0", None],
    "repetition_penalty": [0, -1.2, 0.001, 101, 10**400, math.inf, math.nan, True, None],
    "seed": [-1, 2**64, 1.0, True, "7"],
}


@pytest.mark.parametrize(("name", "value"), [(name, v) for name in BAD for v in BAD[name]])
def test_a_value_out_of_range_is_refused_in_one_sentence(name, value):
    with pytest.raises(UsageError) as caught:
        SamplingOptions(**{name: value})
    text = str(caught.value)
    assert text.startswith(f"{name} is ") and ": give " in text and "\n" not in text
    assert caught.value.exit_code == 2


def test_the_ends_of_the_ranges_are_served():
    for name, values in {
        "temperature": [0, 0.01, 1, 1000],
        "top_k": [0, 1, 10**12],
        "top_p": [1e-30, 1, 1.0],
        "min_p": [0, 1],
        "repetition_penalty": [0.01, 1, 100],
        "seed": [0, 2**64 - 1, None],
    }.items():
        for value in values:
            assert getattr(SamplingOptions(**{name: value}), name) == value


def state_of(options):
    state = np.zeros(STATE_WORDS, np.int32)
    for word, value in options.words().items():
        state[word] = value
    return state, state.view(np.float32), state.view(np.uint32)


def test_words_hold_the_options():
    options = SamplingOptions(0.7, 40, 0.95, 0.05, 1.1, seed=0xFEDCBA9876543210)
    state, floats, unsigned = state_of(options)
    words = (Word.TEMPERATURE, Word.TOP_P, Word.MIN_P, Word.PENALTY)
    want = np.array([0.7, 0.95, 0.05, 1.1], np.float32)
    assert np.array_equal(floats[list(words)], want)
    assert state[Word.TOP_K] == 40
    assert (unsigned[Word.SEED_LOW], unsigned[Word.SEED_HIGH]) == (0x76543210, 0xFEDCBA98)
    assert len(options.words()) == 7
    assert state_of(SamplingOptions(top_k=10**12))[0][Word.TOP_K] == 2**31 - 1


def test_the_defaults_change_nothing():
    state, floats, _ = state_of(SamplingOptions(seed=0))
    changed = {Word(int(i)) for i in np.flatnonzero(state)}
    assert changed == {Word.TOP_P, Word.PENALTY}
    assert floats[Word.TOP_P] == floats[Word.PENALTY] == 1


def test_a_seed_is_drawn_once():
    options = SamplingOptions(temperature=1.0)
    drawn = options.with_seed()
    assert options.seed is None and 0 <= drawn.seed < 2**64
    assert drawn.with_seed() is drawn and drawn.words() == drawn.words()
    assert dataclasses.replace(drawn, seed=None) == options
    assert len({options.with_seed().seed for _ in range(4)}) == 4
    assert len({options.words()[Word.SEED_LOW] for _ in range(4)}) == 4
