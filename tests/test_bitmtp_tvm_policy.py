"""The choice of rows: what fits, what it promises, and that it pays."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from draft_streams import MTP, PROMPT, STREAMS, TABLES, begun, decode, options, step

from bitmtp_tvm.acceptance import Acceptance
from bitmtp_tvm.modes import resolve
from bitmtp_tvm.policy import Policy, candidates, fixed_choice, plain_choice
from bitmtp_tvm.step_times import StepTimes
from relax_models.state import STATE_WORDS, Layout, Word

WIDTHS = (1, 2, 4, 8, 16, 24, 32, 48, 64)
BIDIRECTIONAL = {**MTP, "block_attention": "bidirectional"}


def rows_of(choice, pending=1):
    blocks = choice.most_drafts + 1 if choice.layout == Layout.OUTCOMES else 1
    return pending + choice.most_drafts + blocks * choice.masks


def times(name, measured=True):
    return StepTimes(TABLES[name], measured)


def policy(mode, name, measured=True, **wanted):
    table = TABLES[name]
    return Policy(options(mode, table, **wanted), tuple(table), times(name, measured))


def all_candidates(wanted, widths):
    chain = candidates(wanted, widths, Layout.CHAIN)
    return (
        chain
        if wanted.mode == "confidence"
        else chain + candidates(wanted, widths, Layout.OUTCOMES)
    )


@pytest.mark.parametrize("mode", ["confidence", "speculative", "hybrid"])
@pytest.mark.parametrize("mtp", [MTP, BIDIRECTIONAL], ids=["causal", "bidirectional"])
@pytest.mark.parametrize("widths", [WIDTHS, (1, 2, 4, 8, 16), (4, 12), (18,)])
def test_every_candidate_fits_its_bucket(mode, mtp, widths):
    found = all_candidates(resolve(mtp, widths, mode=mode), widths)
    assert found
    for choice in found:
        assert choice.width in widths and rows_of(choice) <= choice.width
        assert 1 <= choice.masks <= 8 and 0 <= choice.most_drafts <= choice.masks
        assert (choice.most_drafts == 0) == (mode == "confidence")
        assert not [w for w in widths if max(rows_of(choice), 2 * choice.masks) <= w < choice.width]
        if mtp is BIDIRECTIONAL:
            assert choice.masks == 8
            assert rows_of(choice, 1 + choice.most_chain) <= choice.width + choice.most_drafts * 9
        else:
            assert choice.most_chain == choice.width - 1


@pytest.mark.parametrize(
    ("layout", "widths", "block", "expected"),
    [
        # width, masks, drafts
        ("chain", WIDTHS, 8, (24, 8, 8)),
        ("chain", (1, 2, 4, 8, 16), 8, (16, 8, 7)),
        ("chain", (1, 2, 4, 8, 16), 4, (16, 4, 4)),
        ("chain", (1, 8), 8, (8, 4, 3)),
        ("chain", (1, 3), 8, (3, 1, 1)),
        ("outcomes", WIDTHS, 8, (64, 7, 7)),
        ("outcomes", WIDTHS, 4, (32, 4, 4)),
        ("outcomes", (1, 2, 4, 8, 16), 8, (16, 3, 3)),
        ("outcomes", (1, 4), 8, (4, 1, 1)),
    ],
)
def test_a_fixed_layout_takes_the_bucket_of_its_block(layout, widths, block, expected):
    wanted = resolve(MTP, widths, mode="speculative", layout=layout, block_size=block)
    choice = fixed_choice(wanted, widths)
    assert (choice.width, choice.masks, choice.most_drafts) == expected
    assert choice.layout == Layout[layout.upper()]


def test_a_fixed_layout_leaves_hybrid_masks_for_its_chains():
    wanted = resolve(MTP, WIDTHS[:5], mode="hybrid", layout="outcomes")
    choice = fixed_choice(wanted, WIDTHS[:5])
    assert (choice.width, choice.masks, choice.most_drafts) == (16, 7, 1)


@pytest.mark.parametrize(
    ("widths", "expected"), [((1, 2, 4, 16), (16, 8, 7)), (WIDTHS, (24, 8, 8))]
)
def test_a_fixed_layout_keeps_bidirectional_blocks_whole(widths, expected):
    choice = fixed_choice(resolve(BIDIRECTIONAL, widths, layout="chain"), widths)
    assert (choice.width, choice.masks, choice.most_drafts) == expected


def test_plain_decoding_is_one_row_in_the_smallest_bucket():
    choice = policy("ar", "flat").choice()
    assert choice == plain_choice(tuple(TABLES["flat"]))
    assert choice.words == {
        Word.LAYOUT: Layout.CHAIN,
        Word.MASKS: 0,
        Word.MOST_DRAFTS: 0,
        Word.MOST_CHAIN: 0,
    }


def test_a_choice_stays_the_same_object_while_nothing_changes():
    state = np.zeros(STATE_WORDS, np.int32)
    for fixed in (policy("ar", "flat"), policy("speculative", "flat", layout="chain")):
        assert fixed.update(state) is fixed.choice()
    found = decode(
        options("speculative", TABLES["flat"]),
        TABLES["flat"],
        STREAMS["easy"],
        400,
        policy("speculative", "flat"),
    )
    assert len({id(choice) for choice in found.choices}) <= 4
    assert found.choices[-1] is found.choices[-10]


def brute_force(layout, drafts, run, right):
    """Tokens per step of a long chain of steps, by the transition matrix of drafts that stand."""
    stay = [run[j] - (run[j + 1] if j + 1 < drafts else 0) for j in range(drafts)]
    found = np.array([1 - run[0], *stay])
    matrix, gain = np.zeros((drafts + 1, drafts + 1)), np.zeros(drafts + 1)
    for standing in range(drafts + 1):
        every = float(np.prod(right[:standing]))
        valid = 1.0 if layout == Layout.OUTCOMES else every
        matrix[standing] = valid * found
        matrix[standing, 0] += 1 - valid
        gain[standing] = sum(np.prod(right[: j + 1]) for j in range(standing))
    share = np.linalg.matrix_power(matrix, 1000)[0]
    return 1 + float(share @ gain)


@pytest.mark.parametrize("layout", list(Layout))
@pytest.mark.parametrize("drafts", [1, 3, 7])
def test_expected_tokens_are_those_of_the_chain_of_steps(layout, drafts):
    steps, masks = 10**6, 8
    run = 0.7 * 0.8 ** np.arange(masks)
    right = np.array([0.9, 0.85, 0.8, 0.8, 0.75, 0.7, 0.7, 0.6])
    # In a block that drafts j + 1 tokens, all before the last are right this often.
    before = np.concatenate(([1], np.cumprod(right)[:-1]))
    evaluated = steps * run * before * (np.arange(masks) < drafts)
    offered = np.full(masks, steps)
    counts = np.stack([evaluated, evaluated * right, offered, steps * run, 0 * run])
    acceptance = Acceptance(masks)
    acceptance.add(counts, drafts, 0)
    found = acceptance.tokens_per_step(
        layout, drafts=drafts, masks=masks, min_chain=masks + 1, most_chain=63
    )
    assert found == pytest.approx(brute_force(layout, drafts, run, right), rel=1e-4)


def test_expected_tokens_of_confidence_are_the_chain():
    steps, chain = 10**6, np.array([0.5, 0.4, 0.1, 0.0])
    counts = np.stack([0 * chain, 0 * chain, np.full(4, steps), steps * chain, steps * chain])
    acceptance = Acceptance(4)
    acceptance.add(counts, 0, 0)
    rows = {"drafts": 0, "masks": 4, "most_chain": 63}
    expected = {min_chain: 0.0 for min_chain in (1, 2, 4, 5)} | {1: 1.0, 2: 0.9}
    for min_chain, gain in expected.items():
        found = acceptance.tokens_per_step(Layout.CHAIN, min_chain=min_chain, **rows)
        assert found == pytest.approx(1 + gain, abs=1e-4)
    rows["most_chain"] = 1
    found = acceptance.tokens_per_step(Layout.CHAIN, min_chain=1, **rows)
    assert found == pytest.approx(1.5, abs=1e-4)


def test_drafts_that_had_no_room_say_nothing_about_being_right():
    """Counts of one draft a step leave what is known of the second where it was."""
    wide, narrow = Acceptance(2), Acceptance(2)
    wide.add(np.array([[90, 80], [90, 80], [100, 100], [90, 80], [0, 0]]), 2, 0)
    narrow.add(np.array([[90, 0], [90, 0], [100, 100], [90, 80], [0, 0]]), 1, 0)
    promise = {"drafts": 2, "masks": 2, "min_chain": 3, "most_chain": 63}
    for acceptance in (wide, narrow):
        found = acceptance.tokens_per_step(Layout.OUTCOMES, **promise)
        assert found == pytest.approx(2.7, abs=0.05)


PAIRS = [
    (table, stream) for table in ("launches", "flat", "stairs", "sloped") for stream in STREAMS
]


@pytest.mark.parametrize(("name", "stream"), PAIRS)
@pytest.mark.parametrize("mode", ["speculative", "hybrid"])
def test_auto_does_not_lose_to_plain_decoding(name, stream, mode):
    table = TABLES[name]
    found = decode(
        options(mode, table), table, STREAMS[stream], 256, policy(mode, name), switch=0.25
    )
    # Of drafts that are sure and wrong some ten plain steps are lost before that is known.
    assert found.rate * table[1] >= (0.955 if stream == "hopeless" else 0.98)


def test_where_drafting_promises_much_a_hard_beginning_does_not_end_it():
    """40 tokens with nothing to draft, then easy text: the trial goes on, as no draft was wrong."""
    easy = STREAMS["easy"]
    blank = np.full(8, 1e-3), np.zeros(8, bool)
    late = replace(easy, blocks={PROMPT + i: blank for i in range(40)})
    table = TABLES["demo"]
    for mode in ("speculative", "hybrid"):
        found = decode(options(mode, table), table, late, 200, policy(mode, "demo"))
        assert found.rate * table[1] >= 1.7


@pytest.mark.parametrize("mode", ["speculative", "hybrid"])
def test_a_request_begins_with_steps_that_it_can_pay_for(mode):
    """The narrowest ones, for the demo's table, and soon wide ones."""
    table = TABLES["demo"]
    found = decode(options(mode, table), table, STREAMS["easy"], 200, policy(mode, "demo"))
    widths = [choice.width for choice in found.choices]
    assert 1 < widths[0] < 16 <= widths[-1]
    rows = [choice.width for choice in found.choices if choice.width < 16]
    assert len(rows) <= 3 and found.rate * table[1] >= 3.0


def test_plain_steps_under_way_do_not_use_up_a_trial():
    """On a GPU a chunk is under way when the choice changes; it says nothing about the new one."""
    table, followed = TABLES["demo"], policy("hybrid", "demo")
    wanted = options("hybrid", table)
    state, ring = begun(wanted, 2000)
    blank = np.full(8, 1e-3), np.zeros(8, bool)
    nothing = replace(STREAMS["easy"], blocks={PROMPT + i: blank for i in range(2000)})
    plain = choice = followed.choice()
    while plain.width > 1 or choice.width == 1:
        plain = choice
        for word, value in choice.words.items():
            state[word] = value
        for _ in range(min(4, choice.most_steps or 4)):
            step(state, ring, choice.width, nothing)
        choice = followed.update(state)
    assert choice.most_steps is not None
    # As the chunk in front of it was: the words of the trial are not written yet.
    for _ in range(8):
        step(state, ring, plain.width, nothing)
    assert followed.update(state) is choice


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("mode", ["speculative", "hybrid"])
def test_text_that_turns_easy_late_is_drafted_soon(mode, ahead):
    easy = STREAMS["easy"]
    blank = np.full(8, 1e-3), np.zeros(8, bool)
    late = replace(easy, blocks={PROMPT + i: blank for i in range(150)})
    table = TABLES["demo"]
    found = decode(options(mode, table), table, late, 750, policy(mode, "demo"), ahead=ahead)
    plain = [choice.width == 1 for choice in found.choices]
    assert any(plain) and not plain[-1]
    assert found.rate * table[1] >= 1.5


@pytest.mark.parametrize("name", ["launches", "flat", "sloped"])
def test_auto_does_not_lose_in_long_hopeless_runs(name):
    table = TABLES[name]
    found = decode(
        options("speculative", table),
        table,
        STREAMS["hopeless"],
        2000,
        policy("speculative", name),
        switch=0.25,
    )
    # Where drafting promises much, more may be tried.
    assert found.rate * table[1] >= (0.97 if name == "launches" else 0.98)


@pytest.mark.parametrize("name", TABLES)
def test_a_short_hopeless_run_loses_a_few_plain_steps_and_the_next_ones_nothing(name):
    table, followed = TABLES[name], policy("speculative", name)
    runs = [
        decode(options("speculative", table), table, STREAMS["hopeless"], 16, followed)
        for _ in range(5)
    ]
    lost = [run.milliseconds / table[1] - 16 for run in runs]
    # Where drafting promises much, more may be tried.
    first, whole = (7, 10) if name == "demo" else (5, 5.5)
    assert lost[0] <= first
    assert sum(lost) <= whole


@pytest.mark.parametrize("stream", STREAMS)
def test_where_time_grows_with_width_nothing_is_tried(stream):
    table = TABLES["linear"]
    found = decode(
        options("speculative", table), table, STREAMS[stream], 64, policy("speculative", "linear")
    )
    assert {choice.width for choice in found.choices} == {1}
    assert found.milliseconds == 64


@pytest.mark.parametrize(
    ("mode", "name", "stream"),
    [
        ("speculative", "flat", "easy"),
        ("speculative", "flat", "overconfident"),
        ("speculative", "launches", "calibrated"),
        ("speculative", "stairs", "easy"),
        ("hybrid", "stairs", "calibrated"),
        ("confidence", "launches", "easy"),
    ],
)
def test_auto_comes_near_the_best_fixed_choice(mode, name, stream):
    table, length = TABLES[name], 500
    wanted, followed = options(mode, table), policy(mode, name)
    decode(wanted, table, STREAMS[stream], 250, followed)
    found = decode(wanted, table, STREAMS[stream], length, followed)
    fixed = {
        choice: decode(wanted, table, STREAMS[stream], length, choice).rate
        for choice in all_candidates(wanted, tuple(table))[:: 1 if mode != "hybrid" else 5]
    }
    assert found.rate >= 0.93 * max(fixed.values())


def test_a_steep_table_is_learned_to_pay_where_drafts_are_good():
    """There wide steps cost too much to be tried at once: plain steps save up for them."""
    table, followed = TABLES["sloped"], policy("speculative", "sloped")
    wanted = options("speculative", table)
    first = decode(wanted, table, STREAMS["easy"], 1500, followed)
    assert first.rate * table[1] >= 1
    second = decode(wanted, table, STREAMS["easy"], 500, followed)
    assert second.rate * table[1] >= 1.1


@pytest.mark.parametrize("mode", ["speculative", "hybrid"])
def test_a_predicted_table_is_not_trusted_with_outcomes(mode):
    table = TABLES["flat"]
    layouts = {
        measured: {
            choice.layout
            for stream in ("easy", "overconfident")
            for choice in decode(
                options(mode, table),
                table,
                STREAMS[stream],
                200,
                policy(mode, "flat", measured),
            ).choices
        }
        for measured in (False, True)
    }
    assert layouts == {False: {Layout.CHAIN}, True: {Layout.CHAIN, Layout.OUTCOMES}}


def test_chains_fit_the_bucket_that_runs():
    for name, stream in itertools.product(("launches", "flat"), ("easy", "hopeless")):
        table = TABLES[name]
        found = decode(
            options("confidence", table), table, STREAMS[stream], 100, policy("confidence", name)
        )
        assert all(choice.most_chain < choice.width for choice in found.choices)
        assert found.rate * table[1] > 1.5


def test_text_that_turns_easy_is_found_out():
    """After a long hopeless stretch trials notice that drafts are right again."""
    table, followed = TABLES["flat"], policy("speculative", "flat")
    wanted = options("speculative", table)
    decode(wanted, table, STREAMS["hopeless"], 600, followed)
    found = decode(wanted, table, STREAMS["easy"], 600, followed)
    assert found.choices[0].width <= 4
    assert found.choices[-1].width >= 16
    assert found.rate * table[1] >= 2
