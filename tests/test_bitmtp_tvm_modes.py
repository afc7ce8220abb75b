import math

import numpy as np
import pytest

from bitmtp_tvm.errors import UsageError
from bitmtp_tvm.modes import LAYOUTS, MODES, READ, DecodeOptions, resolve
from relax_models.state import Layout, Mode

WIDTHS = (1, 2, 4, 8, 16, 24, 32, 48, 64)


def mtp(block_size=8, block_attention="causal"):
    return {
        "block_size": block_size,
        "mask_token_id": 77,
        "label": "next",
        "block_attention": block_attention,
    }


def test_the_names_are_those_of_the_state():
    assert [Mode[mode.upper()] for mode in MODES] == list(Mode)
    assert [Layout[layout.upper()] for layout in LAYOUTS[1:]] == list(Layout)
    assert set(READ) == set(MODES)


def test_a_model_with_mtp_speculates_and_one_without_does_not():
    assert resolve(mtp(), WIDTHS) == DecodeOptions("speculative", 8, 0.9, 0.5, 6, "auto", False, 77)
    assert resolve(None, WIDTHS) == resolve(None, (1,), mode="ar") == DecodeOptions()
    assert resolve(mtp(), (1,), mode="ar").block_size == 0
    assert resolve(mtp(4, "bidirectional"), WIDTHS).bidirectional is True


@pytest.mark.parametrize(
    ("block", "chain"), [(1, 1), (2, 2), (3, 3), (4, 3), (5, 4), (6, 5), (8, 6), (16, 12)]
)
def test_min_chain_is_three_quarters_of_the_block(block, chain):
    assert resolve(mtp(block), WIDTHS, mode="hybrid").min_chain == chain
    assert resolve(mtp(16), WIDTHS, mode="hybrid", block_size=block).min_chain == chain


def test_what_is_given_is_taken():
    options = resolve(
        mtp(),
        WIDTHS,
        mode="hybrid",
        block_size=5,
        threshold=1,
        draft_threshold=0.25,
        min_chain=5,
        layout="outcomes",
    )
    assert options == DecodeOptions("hybrid", 5, 1.0, 0.25, 5, "outcomes", False, 77)
    assert resolve(mtp(), WIDTHS, mode="confidence", threshold=np.float64(0.5)).threshold == 0.5


@pytest.mark.parametrize(
    ("model", "given", "message"),
    [
        (mtp(), {"mode": "greedy"}, "mode 'greedy' is unknown: choose one of ar, confidence, spe"),
        (mtp(), {"layout": "tree"}, "layout 'tree' is unknown: choose one of auto, chain"),
        (None, {"mode": "speculative"}, "needs a model with multi-token prediction.* use mode ar"),
        (None, {"mode": "hybrid", "min_chain": 3}, "needs a model with multi-token prediction"),
        (mtp(), {"block_size": 0}, "block_size is 0: ask for 1 to 8"),
        (mtp(), {"block_size": 2.0}, "block_size is 2.0: ask for 1 to 8"),
        (mtp(), {"block_size": True}, "block_size is True"),
        (mtp(), {"block_size": 9}, "fewer may be used at run time with causal blocks; more, never"),
        (mtp(8, "bidirectional"), {"block_size": 7}, "used whole: leave it at 8"),
        (mtp(), {"mode": "hybrid", "min_chain": 9}, "at most block_size = 8 tokens: give 1 to 8"),
        (mtp(), {"mode": "hybrid", "block_size": 4, "min_chain": 5}, "block_size = 4 tokens"),
        (mtp(), {"mode": "hybrid", "min_chain": 0}, "min_chain is 0"),
        (mtp(), {"draft_threshold": 0}, "draft_threshold is 0: give a probability above 0"),
        (mtp(), {"draft_threshold": 1.01}, "draft_threshold is 1.01"),
        (mtp(), {"mode": "confidence", "threshold": math.nan}, "threshold is nan"),
        (mtp(), {"mode": "confidence", "threshold": "0.9"}, "threshold is '0.9'"),
        (mtp(), {"mode": "confidence", "threshold": True}, "threshold is True"),
    ],
)
def test_what_cannot_be_served_is_one_sentence(model, given, message):
    with pytest.raises(UsageError, match=message):
        resolve(model, WIDTHS, **given)


GIVEN = {
    "block_size": 4,
    "threshold": 0.9,
    "draft_threshold": 0.5,
    "min_chain": 3,
    "layout": "chain",
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", GIVEN)
def test_an_option_that_the_mode_does_not_read_is_refused(mode, name):
    if name in READ[mode]:
        resolve(mtp(), WIDTHS, mode=mode, **{name: GIVEN[name]})
        return
    with pytest.raises(UsageError, match=f"{name} means nothing in mode {mode}") as caught:
        resolve(mtp(), WIDTHS, mode=mode, **{name: GIVEN[name]})
    readers = str(caught.value).rsplit("(", 1)[1].rstrip(")").split(", ")
    assert readers and all(name in READ[reader] for reader in readers)


@pytest.mark.parametrize(
    ("attention", "layout", "least"),
    [
        ("causal", "auto", 3),
        ("causal", "chain", 3),
        ("causal", "outcomes", 4),
        ("bidirectional", "auto", 10),
        ("bidirectional", "outcomes", 18),
    ],
)
def test_the_widest_bucket_must_hold_a_draft_and_the_masks_for_the_next(attention, layout, least):
    drafting = {"mode": "speculative", "layout": layout}
    assert resolve(mtp(8, attention), (1, least), **drafting).layout == layout
    with pytest.raises(UsageError, match=f"has {least - 1} rows, and drafting needs {least}"):
        resolve(mtp(8, attention), (1, least - 1), **drafting)


def test_the_default_is_to_draft_where_a_bucket_has_room():
    assert resolve(mtp(8), (1, 3)).mode == "speculative"
    assert resolve(mtp(8), (1, 2)).mode == "ar"
    assert resolve(mtp(8, "bidirectional"), (1, 9)).mode == "ar"
