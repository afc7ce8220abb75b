"""The search over the chain: it finds what is best together, and repeats what is close."""

import math
from itertools import product

import pytest

from bitmtp_tvm.tuning_chain import descend, shares, shortlist

# Seconds of two kernels by themselves, and what they cost each other in the chain.
ALONE = {"a1": 1.0, "a2": 1.1, "a3": 2.5, "b1": 2.0, "b2": 2.1}
TOGETHER = {("a1", "b1"): 0.9, ("a2", "b1"): 0.6, ("a1", "b2"): 0.5}
TOPS = {"a": ["a1", "a2", "a3"], "b": ["b1", "b2"]}
BEST_ALONE = {"a": "a1", "b": "b1"}


def chain(choice):
    pair = choice["a"], choice["b"]
    return ALONE[pair[0]] + ALONE[pair[1]] + TOGETHER.get(pair, 0.0)


def test_what_is_best_together_wins_over_what_is_best_alone():
    found = descend(TOPS, [{"a": "a3", "b": "b2"}, BEST_ALONE], chain)
    best = min(product(*TOPS.values()), key=lambda p: chain(dict(zip("ab", p, strict=True))))
    assert found.choice == dict(zip("ab", best, strict=True)) == {"a": "a2", "b": "b2"}
    assert found.seconds == pytest.approx(chain(found.choice))
    assert found.before == pytest.approx(chain({"a": "a3", "b": "b2"}))
    assert found.tried <= 6


def test_a_lucky_measurement_does_not_win():
    """The first look at one chain is far too good; the repeats say so."""
    looks = []

    def measure(choice):
        looks.append(choice)
        lucky = choice == {"a": "a3", "b": "b1"} and looks.count(choice) == 1
        return 0.1 if lucky else chain(choice)

    found = descend(TOPS, [BEST_ALONE], measure)
    assert found.choice != {"a": "a3", "b": "b1"}
    assert found.seconds >= chain({"a": "a2", "b": "b2"})


def test_a_chain_that_fails_is_left_out():
    def measure(choice):
        return math.inf if choice["b"] == "b2" else chain(choice)

    assert descend(TOPS, [BEST_ALONE], measure).choice["b"] == "b1"


@pytest.mark.parametrize("top", [1, 2, 3, 9])
def test_the_rule_is_always_tried(top):
    seconds = {"x": 3.0, "y": 1.0, "z": 2.0}
    names = shortlist(seconds, ["x", "fails"], top)
    assert "x" in names and len(names) == min(top, 3)
    assert names == sorted(names, key=lambda n: seconds[n])
    assert top == 1 or names[0] == "y"
    assert shortlist(seconds, ["x", "z"], 2) == ["z", "x"]


def test_a_chain_is_shared_out_as_its_kernels_are_alone():
    counts = {"a": 3, "b": 1}
    found = shares(8.0, {"a": 2.0, "b": 4.0}, counts)
    assert sum(found[name] * counts[name] for name in counts) == pytest.approx(8.0)
    assert found["b"] == pytest.approx(2 * found["a"])
