import pytest

from bitmtp_tvm.errors import UsageError
from bitmtp_tvm.stopping import StopCondition

EOS = 9


def condition(max_new_tokens=100, context=100, eos=(EOS,)):
    return StopCondition(frozenset(eos), max_new_tokens, context)


@pytest.mark.parametrize(
    ("accepted", "n", "prompt", "stop", "expected"),
    [
        ([1, 2], 3, 3, condition(), (2, None)),
        ([1, EOS, 2], 3, 3, condition(), (2, "stop")),
        ([8], 3, 3, condition(eos=(7, 8)), (1, "stop")),
        ([1], 3, 3, condition(max_new_tokens=1), (1, "length")),
        ([1, 2, 3], 5, 3, condition(max_new_tokens=4), (2, "length")),
        ([1, 2, 3], 5, 3, condition(context=6), (1, "length")),
        # In token order: an end token before the cap stops, one after it was never generated.
        ([EOS, 2, 3], 3, 3, condition(max_new_tokens=2), (1, "stop")),
        ([1, 2, EOS], 3, 3, condition(max_new_tokens=2), (2, "length")),
        # Both at one token: the model was done.
        ([1, EOS], 3, 3, condition(max_new_tokens=2), (2, "stop")),
        ([1, EOS], 3, 3, condition(context=5), (2, "stop")),
        ([1, 2], 3, 3, condition(max_new_tokens=2, eos=()), (2, "length")),
    ],
)
def test_cut_goes_in_token_order(accepted, n, prompt, stop, expected):
    assert stop.cut(accepted, n, prompt) == expected


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("stop", [condition(7), condition(context=9), condition(eos=(14,))])
def test_the_block_size_does_not_change_where_it_ends(stop, size):
    tokens, prompt = list(range(10, 40)), 3
    kept: list[int] = []
    reason = None
    while reason is None:
        block = tokens[len(kept) : len(kept) + size]
        count, reason = stop.cut(block, prompt + len(kept), prompt)
        kept += block[:count]
    assert (kept, reason) == {
        condition(7): (tokens[:7], "length"),
        condition(context=9): (tokens[:6], "length"),
        condition(eos=(14,)): (tokens[:5], "stop"),
    }[stop]


@pytest.mark.parametrize(("prompt", "reason"), [(99, None), (100, "length")])
def test_a_prompt_that_fills_the_context_leaves_no_room(prompt, reason):
    assert condition().before(prompt) == reason


@pytest.mark.parametrize("wanted", [0, -1])
def test_less_than_one_token_is_refused(wanted):
    with pytest.raises(UsageError, match=f"max_new_tokens is {wanted}"):
        condition(max_new_tokens=wanted)
