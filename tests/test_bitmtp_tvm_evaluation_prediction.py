"""Numbers worked out by hand: intervals, calibration, what mask rows are worth."""

import math

import numpy as np
import pytest

from bitmtp_tvm.evaluation.calibration import BINS, calibrate
from bitmtp_tvm.evaluation.intervals import Bootstrap, Estimate, share
from bitmtp_tvm.evaluation.prediction import compare, judged, measure
from bitmtp_tvm.evaluation.rows import WindowRows


def test_a_ratio_is_that_of_the_sums():
    found = Bootstrap(3, 0).ratio(np.array([1.0, 2.0, 9.0]), np.array([1.0, 2.0, 3.0]))
    assert found.value == 2.0
    # All draws lie between the least and the largest ratio of one unit.
    assert 1.0 <= found.low < 2.0 < found.high <= 3.0


def test_an_interval_is_the_same_for_the_same_seed():
    values, ones = np.arange(20.0), np.ones(20)
    one, other = (Bootstrap(20, seed).ratio(values, ones) for seed in (4, 4))
    assert one == other != Bootstrap(20, 5).ratio(values, ones)


def test_one_unit_has_no_interval():
    assert Bootstrap(1, 0).ratio(np.array([3.0]), np.array([2.0])) == Estimate(1.5)
    with pytest.raises(ValueError, match="nothing to draw"):
        Bootstrap(0, 0)


def test_nineteen_of_twenty_intervals_hold_the_truth(rng):
    inside = 0
    for seed in range(60):
        sample = (rng.random(40) < 0.3).astype(float)
        found = Bootstrap(40, seed).ratio(sample, np.ones(40))
        inside += found.low <= 0.3 <= found.high
    assert 51 <= inside <= 59


def test_a_share_has_a_width_at_its_ends():
    # Wilson, 1927: at 0 hits the upper end is z^2 / (n + z^2).
    found = share(0, 164)
    assert (found.value, found.low) == (0, 0)
    assert found.high == pytest.approx(1.959964**2 / (164 + 1.959964**2))
    assert share(164, 164).low == pytest.approx(1 - found.high)
    with pytest.raises(ValueError, match="nothing was tried"):
        share(0, 0)


def test_estimates_in_words():
    found = Estimate(0.00312, 0.0012, 0.005)
    assert found.text(2, 100) == "0.31 (0.12-0.50)"
    assert Estimate(0.1, -0.2, 0.4).text(1) == "0.1 (-0.2 to 0.4)"
    assert Estimate(2.0).text(1) == "2.0" and Estimate(0.0).map(math.exp) == Estimate(1.0)


def test_the_calibration_error_is_the_mean_distance_of_the_bins():
    # 10 rows that say 0.95, 9 right; 10 that say 0.15, 1 right: (0.5 + 0.5) / 20.
    confidence = np.array([0.95] * 10 + [0.15] * 10)
    right = np.array([True] * 9 + [False] + [True] + [False] * 9)
    found = calibrate(confidence, right)
    assert found.error == pytest.approx(0.05)
    assert found.sure == (10, 9) and found.right_when_sure == 0.9
    assert found.points() == [
        (pytest.approx(0.15), pytest.approx(0.1), 10),
        (pytest.approx(0.95), pytest.approx(0.9), 10),
    ]


def test_bins_hold_their_upper_ends():
    found = calibrate(np.array([0.0, 1 / BINS, 1.0]), np.array([True, False, True]))
    assert found.counts[0] == 2 and found.counts[-1] == 1
    assert calibrate(np.zeros(0), np.zeros(0, bool)).right_when_sure is None


def rows(tokens, top, anchors, mask_top, confidence=None, nll=None):
    mask_top = np.array(mask_top)
    return WindowRows(
        np.array(tokens),
        np.zeros(len(tokens) - 1) if nll is None else np.array(nll),
        np.array(top),
        np.array(anchors),
        mask_top,
        np.full(mask_top.shape, 0.5) if confidence is None else np.array(confidence),
    )


# Tokens:        0  1  2  3  4  5  6
TEXT = [10, 11, 12, 13, 14, 15, 16]
# Clean rows say 11 12 99 14 15 16: that for token 3 is wrong.
TOP = [11, 12, 99, 14, 15, 16]


def test_mask_rows_are_judged_by_text_and_by_clean_rows():
    # Anchor 0: rows for tokens 2, 3, 4; anchor 1: for tokens 3, 4, 5; anchor 2: for 4, 5, 6.
    said = [[12, 13, 77], [99, 14, 15], [14, 15, 16]]
    right, same, accepted = judged(rows(TEXT, TOP, [0, 1, 2], said))
    assert right.tolist() == [[True, True, False], [False, True, True], [True, True, True]]
    assert same.tolist() == [[True, False, False], [True, True, True], [True, True, True]]
    # Anchor 2's own clean row is wrong, so nothing of its block is accepted.
    assert accepted.tolist() == [[True, True, False], [False] * 3, [False] * 3]


def test_windows_are_added_up():
    window = rows(TEXT, TOP, [0, 1, 2], [[12, 13, 77], [99, 14, 15], [14, 15, 16]], nll=[0.5] * 6)
    other = rows(TEXT, TEXT[1:], [0, 1, 2], [[12, 13, 14]] * 3, nll=[1.5] * 6)
    found = measure("model", [window, other], 0)
    assert found.loss.value == 1.0 and found.perplexity.value == pytest.approx(math.e)
    assert found.accuracy.value == 11 / 12
    assert (found.loss.low, found.loss.high) == (0.5, 1.5)
    blocks = found.blocks
    # By place: right in 2, 3, 2 of the first window's three blocks, and in one of the other's.
    assert [one.value for one in blocks.accuracy] == [3 / 6, 4 / 6, 3 / 6]
    assert [one.value for one in blocks.accepted] == [2 / 6, 2 / 6, 1 / 6]
    assert blocks.accepted_length.value == pytest.approx(1 + 5 / 6)
    assert blocks.anchors == 6 and found.to_dict()["tokens"] == 12


def test_without_mask_rows_there_is_only_the_loss():
    window = rows(TEXT, TOP, [], np.zeros((0, 3), int), nll=[0.5] * 6)
    found = measure("model", [window], 0)
    assert found.blocks is None and found.to_dict()["masks"] is None


def test_a_paired_interval_is_that_of_the_difference(rng):
    base = rng.uniform(1, 3, (40, 6))

    def predicted(nll):
        empty = np.zeros((0, 3), int)
        return measure("m", [rows(TEXT, TOP, [], empty, nll=row) for row in nll], 0)

    plain, joint = predicted(base), predicted(base + 0.01)
    cost = compare(joint, plain, 0)
    # Every window costs the same: the interval has no width, whatever the windows differ by.
    assert cost.difference.value == pytest.approx(0.01)
    assert cost.difference.high - cost.difference.low < 1e-9
    assert plain.loss.high - plain.loss.low > 0.05
    assert cost.share.value == pytest.approx(0.01 / plain.loss.value)
    noisy = compare(predicted(base + rng.normal(0.01, 0.1, (40, 1))), plain, 0)
    assert noisy.difference.low < 0.01 < noisy.difference.high
    assert noisy.difference.high - noisy.difference.low == pytest.approx(4 * 0.1 / 40**0.5, rel=0.4)
    with pytest.raises(ValueError, match="different windows"):
        compare(joint, predicted(base[:5]), 0)
