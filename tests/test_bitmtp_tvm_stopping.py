from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bitmtp_tvm.errors import BitMTPError, UsageError
from bitmtp_tvm.stopping import StopCondition, StopStrings, check_stop_strings

EOS = 9


def condition(max_new_tokens=100, context=100, eos=(EOS,)):
    return StopCondition(frozenset(eos), max_new_tokens, context)


@pytest.mark.parametrize(("prompt", "reason"), [(99, None), (100, "length")])
def test_a_prompt_that_fills_the_context_leaves_no_room(prompt, reason):
    assert condition().before(prompt) == reason


@pytest.mark.parametrize(
    ("wanted", "prompt", "limit"), [(7, 3, 10), (97, 3, 100), (98, 3, 100), (10**30, 3, 100)]
)
def test_the_limit_is_the_wanted_tokens_or_the_context(wanted, prompt, limit):
    assert condition(wanted).limit(prompt) == limit


@pytest.mark.parametrize("wanted", [0, -1, 1.5, "4", None])
def test_a_number_of_tokens_is_a_whole_number_of_at_least_one(wanted):
    with pytest.raises(UsageError, match=f"max_new_tokens is {wanted!r}"):
        condition(wanted)


def test_more_end_tokens_than_the_device_looks_for_are_refused():
    assert len(condition(eos=range(16)).eos_token_ids) == 16
    with pytest.raises(BitMTPError, match="17 end tokens and at most 16 can be looked for"):
        condition(eos=range(17))


@pytest.mark.parametrize("stop", ["", [""], ["a", ""], [None], [b"a"], [3]])
def test_a_stop_string_is_a_text_of_at_least_one_character(stop):
    with pytest.raises(UsageError, match="is no stop string"):
        check_stop_strings(stop)


def test_one_text_is_one_stop_string():
    assert check_stop_strings("END") == ("END",)
    assert check_stop_strings(["a", "b"]) == ("a", "b") and check_stop_strings(()) == ()


def splits(text, most=3):
    """All ways to cut `text` into up to `most` pieces, and one character at a time."""
    for count in range(most):
        for cuts in combinations(range(1, len(text)), count):
            yield [text[a:b] for a, b in zip((0, *cuts), (*cuts, len(text)), strict=True)]
    yield list(text)


def read(pieces, stops):
    """Shown pieces, whether a stop string was found, and the pieces that it took."""
    found, shown = StopStrings(stops), []
    for count, piece in enumerate(pieces, start=1):
        text, stopped = found.push(piece)
        shown.append(text)
        if stopped:
            return shown, True, count
    return [*shown, found.flush()], False, len(pieces)


@pytest.mark.parametrize(
    ("text", "stops", "expected"),
    [
        ("one two three", ["two"], "one "),
        ("one two three", ["four"], "one two three"),
        ("one two", ["two"], "one "),
        ("two one", ["two"], ""),
        ("aaab", ["aab"], "a"),
        ("ababac", ["abac"], "ab"),
        # The one that is complete first, whatever stands around it.
        ("xabcd", ["abcd", "bc"], "xa"),
        ("xabcd", ["abcd", "cd"], "x"),
        ("xabc", ["abc", "bc", "c"], "x"),
        ("Ende 漢字 👍", ["字 👍"], "Ende 漢"),
        ("a\n\nb", ["\n\n"], "a"),
        # What looked like the beginning of one comes after all.
        ("the en", ["end"], "the en"),
        ("enenen", ["end"], "enenen"),
        ("aaaa", ["aaaaa"], "aaaa"),
        ("no stop", [], "no stop"),
    ],
)
def test_a_stop_string_is_found_at_every_split(text, stops, expected):
    for pieces in splits(text):
        shown, stopped, _ = read(pieces, stops)
        assert "".join(shown) == expected
        assert stopped == (expected != text)


def test_text_is_held_back_only_while_it_may_be_a_stop_string():
    stop = StopStrings(["END"])
    steps = [stop.push(piece) for piece in ("xE", "N", "E", "ND")]
    assert steps == [("x", False), ("", False), ("EN", False), ("", True)]


@settings(max_examples=200, deadline=None)
@given(
    st.text("ab", max_size=12),
    st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
    st.data(),
)
def test_where_the_pieces_part_does_not_matter(text, stops, data):
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=4)))
    pieces = [text[a:b] for a, b in zip((0, *cuts), (*cuts, len(text)), strict=True)]
    shown, stopped, count = read(pieces, stops)
    # One character at a time there is no choice of what comes first.
    ends = [end for end in range(len(text) + 1) if text[:end].endswith(tuple(stops))]
    assert stopped == bool(ends)
    if not ends:
        assert "".join(shown) == text
        return
    first = text[: ends[0]]
    longest = max(len(stop) for stop in stops if first.endswith(stop))
    assert "".join(shown) == first[:-longest]
    assert len("".join(pieces[: count - 1])) < ends[0] <= len("".join(pieces[:count]))
