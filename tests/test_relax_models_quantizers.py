from fractions import Fraction

import numpy as np
import pytest

from relax_models.quantizers import QUANTIZERS, get_quantizer

EVERY = pytest.mark.parametrize("name", QUANTIZERS)
TERNARY = pytest.mark.parametrize("name", ["ternary-g128", "ternary-g128-absmean"])


def dequantised(name, codes, scales):
    signs = codes.astype(np.float32) - 1
    if QUANTIZERS[name].format == "binary-g128":
        signs = 2 * codes.astype(np.float32) - 1
    return signs * np.repeat(scales.astype(np.float32), 128, axis=1)


def scalar(name, group, threshold):
    """One group of 128, in exact fractions: the codes, and the scale before float16."""
    exact = [Fraction(float(w)) for w in group]
    mean = sum(abs(w) for w in exact) / 128
    if name == "binary-g128":
        return [int(w >= 0) for w in exact], float(mean)
    kept = [w for w in exact if abs(w) > Fraction(threshold) * mean]
    codes = [1 + (w in kept) * (1 if w > 0 else -1) for w in exact]
    if name == "ternary-g128":
        mean = sum(abs(w) for w in kept) / len(kept)
    return codes, float(mean)


@EVERY
def test_every_rule_is_its_description(name):
    random = np.random.default_rng(1)
    weights = (random.normal(size=(5, 384)) * random.uniform(0.01, 3, (5, 1))).astype(np.float32)
    quantizer = QUANTIZERS[name]
    codes, scales = quantizer.quantize(weights)
    assert codes.shape == (5, 384) and codes.dtype == np.uint8
    assert scales.shape == (5, 3) and scales.dtype == np.float16
    for row, g in np.ndindex(scales.shape):
        columns = slice(g * 128, (g + 1) * 128)
        wanted, scale = scalar(name, weights[row, columns], quantizer.threshold)
        assert codes[row, columns].tolist() == wanted
        assert scales[row, g] == np.float16(scale)
    assert len(np.unique(scales)) == scales.size


@EVERY
@pytest.mark.parametrize("threshold", [None, 0.05, 0.95])
def test_quantised_weights_come_back_bit_for_bit(name, threshold):
    """Whatever the share of zeros: every weight, and every scale where it leaves a trace."""
    if QUANTIZERS[name].threshold is None:
        threshold = None
    random = np.random.default_rng(2)
    scales = np.exp(random.normal(size=(40, 2)) * 4).clip(1e-7, 6e4).astype(np.float16)
    codes = random.integers(0, 2, (40, 256)) * 2
    if QUANTIZERS[name].format != "binary-g128":
        codes = np.where(random.random((40, 256)) < np.linspace(0, 1, 40)[:, None], 1, codes)
        codes[3] = 1
        codes[4, :128], codes[4, 5] = 1, 2
    weights = (codes - 1).astype(np.float32) * np.repeat(scales.astype(np.float32), 128, axis=1)
    found, found_scales = get_quantizer(name, threshold).quantize(weights)
    np.testing.assert_array_equal(dequantised(name, found, found_scales), weights)
    used = np.abs(weights).reshape(40, 2, 128).max(axis=-1) > 0
    np.testing.assert_array_equal(found_scales[used], scales[used])
    assert not found_scales[~used].any()


def test_binary_zero_is_positive():
    codes, scales = QUANTIZERS["binary-g128"].quantize(np.float32([[0.0, -0.0, -1, 1] * 32]))
    assert codes[0, :4].tolist() == [1, 1, 0, 1] and scales.tolist() == [[0.5]]


@TERNARY
def test_a_ternary_scale_that_vanishes_takes_its_codes_along(name):
    codes, scales = QUANTIZERS[name].quantize(np.full((1, 128), -1e-9, np.float32))
    assert scales.tolist() == [[0.0]] and (codes == 1).all()


@TERNARY
def test_a_higher_threshold_keeps_less(name):
    weights = np.random.default_rng(3).normal(size=(1, 128)).astype(np.float32)
    shares = [(get_quantizer(name, t).quantize(weights)[0] != 1).mean() for t in (0.2, 0.5, 0.9)]
    assert shares == sorted(shares, reverse=True) and len(set(shares)) == 3


def test_ternary_weights_are_the_nearest_in_least_squares():
    weights = np.random.default_rng(4).normal(size=(1, 128)).astype(np.float32)
    codes, scales = QUANTIZERS["ternary-g128"].quantize(weights)

    def error(scale):
        return np.square(weights - (codes.astype(np.float32) - 1) * scale).sum()

    best = float(scales[0, 0])
    assert error(best) < min(error(best * 1.01), error(best * 0.99))


@EVERY
@pytest.mark.parametrize(
    ("weights", "sentence"),
    [
        (np.ones((2, 100)), "100 weights"),
        (np.full((2, 128), np.nan), "not finite"),
        (np.full((2, 128), -np.inf), "not finite"),
        (np.full((2, 128), 65520.0), "scale 65520 is too large"),
    ],
)
def test_impossible_weights_are_one_sentence(name, weights, sentence):
    with pytest.raises(ValueError, match=sentence):
        QUANTIZERS[name].quantize(weights.astype(np.float32))


def test_one_value_that_is_not_finite_is_enough():
    weights = np.ones((3, 128), np.float32)
    weights[2, 7] = np.nan
    for quantizer in QUANTIZERS.values():
        with pytest.raises(ValueError, match="not finite"):
            quantizer.quantize(weights)


@pytest.mark.parametrize(
    ("name", "threshold", "sentence"),
    [
        ("int4", None, "no rule 'int4'; known: binary-g128, ternary-g128, ternary-g128-absmean"),
        ("binary-g128", 0.5, "has no threshold"),
        ("ternary-g128", 0.0, "between 0 and 1"),
        ("ternary-g128", 1, "between 0 and 1"),
        ("ternary-g128", float("nan"), "between 0 and 1"),
        ("ternary-g128", "0.5", "between 0 and 1"),
    ],
)
def test_impossible_rules_are_one_sentence(name, threshold, sentence):
    with pytest.raises(ValueError, match=sentence):
        get_quantizer(name, threshold)


def test_rules_describe_themselves():
    assert [quantizer.describe() for quantizer in QUANTIZERS.values()] == [
        "binary-g128 absmean",
        "ternary-g128 threshold 0.5 mean of the kept",
        "ternary-g128 threshold 0.5 absmean",
    ]
    assert all(name == entry.name for name, entry in QUANTIZERS.items())
    assert get_quantizer("ternary-g128", 0.25).describe().startswith("ternary-g128 threshold 0.25 ")
