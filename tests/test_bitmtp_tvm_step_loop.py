"""Chunks under a policy that is told what to choose."""

from itertools import cycle

import pytest
from fake_model import FakeModel, hashed, right, right_but_unsure
from following import PROMPT, follow, stop
from twin_session import CHEAP_ROWS, TwinSession, mtp_of

from bitmtp_tvm.decoder import Decoder
from bitmtp_tvm.modes import resolve
from bitmtp_tvm.policy import StepChoice
from relax_models.state import Finish, Kind, Layout, Word


def choice(width, masks, drafts, chain=None, layout=Layout.CHAIN, most_steps=None):
    chain = width - 1 if chain is None else chain
    return StepChoice(width, layout, masks, drafts, chain, most_steps)


PLAIN = choice(1, 0, 0)


class Scripted:
    """Goes through its choices, one at each read-back, again and again.

    `words`: those of the states that were read. Until the end, no step is idle.
    """

    def __init__(self, *choices):
        self._choices = cycle(choices)
        self.lengths, self.words = [], []

    def choice(self):
        return next(self._choices)

    def update(self, state):
        assert state[Word.FINISH] != Finish.RUNNING or not state[Word.IDLE]
        self.lengths.append(int(state[Word.LENGTH]))
        self.words.append({word: state[word] for word in PLAIN.words})
        return next(self._choices)


def generate(choices, mode, depth, wanted=40, model=None, **session):
    model = model or FakeModel()
    session = TwinSession(model, depth=depth, **session)
    decoder = Decoder(session, CHEAP_ROWS)
    policy = choices if isinstance(choices, Scripted) else Scripted(*choices)
    decoder.policy = lambda options: policy
    options = resolve(mtp_of(model), session.widths, mode=mode)
    stream = decoder.generate(PROMPT, stop(wanted), options)
    assert follow(decoder, stream) == model.continuation(PROMPT, wanted)
    assert policy.lengths == sorted(policy.lengths) and policy.lengths[-1] == 4 + wanted
    return session, stream.statistics


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("mode", ["speculative", "hybrid", "confidence"])
@pytest.mark.parametrize(
    "choices",
    [
        (choice(64, 8, 7), PLAIN),
        (PLAIN, choice(64, 8, 7), PLAIN, PLAIN),
        (choice(16, 4, 4), choice(64, 4, 7, layout=Layout.OUTCOMES), choice(8, 3, 3), PLAIN),
        (choice(64, 8, 7, layout=Layout.OUTCOMES), choice(2, 1, 1)),
        (choice(2, 1, 1), choice(4, 2, 1), choice(64, 8, 8)),
    ],
)
def test_the_choice_may_change_at_every_read_back(choices, mode, depth):
    model = FakeModel(quality=hashed(4, 0.85) if mode == "speculative" else right)
    for wanted in 11, 40:
        _, stats = generate(choices, mode, depth, wanted, model)
        assert sum(stats.steps.values()) == stats.forwards + stats.idle_steps


@pytest.mark.parametrize("depth", [1, 2])
def test_words_are_written_when_they_change_and_only_then(depth):
    same = choice(16, 4, 4), choice(16, 4, 4)
    session, _ = generate(same, "speculative", depth)
    assert session.calls.count("write") == 1
    # A changed bucket alone needs no write.
    buckets = choice(16, 4, 4, chain=7), choice(32, 4, 4, chain=7), choice(8, 4, 4, chain=7)
    session, stats = generate(buckets, "speculative", depth)
    assert session.calls.count("write") == 1 and set(stats.steps) == {8, 16, 32}
    other = choice(16, 4, 3)
    session, _ = generate((choice(16, 4, 4), other, other), "speculative", depth)
    assert session.calls.count("write") == 1 and session.calls.count("adjust") > 1


def test_another_choice_waits_for_nothing():
    model = FakeModel(quality=right_but_unsure)
    wide, narrow = choice(16, 8, 7), choice(4, 2, 1)
    policy = Scripted(wide, narrow)
    session, stats = generate(policy, "speculative", 2, 40, model)
    assert session.calls.count("adjust") > 4
    assert 0 not in list(under_way(session.calls))[2:-1]
    # Nor for a wider step in between: one row is pending behind every step.
    assert set(stats.steps) == {16, 4}
    # A new choice is that of the steps enqueued behind it, and of none before.
    expected = [wide, *[wide, narrow] * len(policy.words)]
    assert policy.words == [choice.words for choice in expected[: len(policy.words)]]


@pytest.mark.parametrize(
    ("mode", "first", "second", "holding"),
    [
        # Eight unverified tokens behind a verified one, or as many as the words allow.
        ("hybrid", choice(32, 8, 8), PLAIN, 16),
        ("hybrid", choice(32, 8, 8, chain=7), choice(4, 1, 1), 8),
        ("confidence", choice(16, 3, 0), choice(2, 1, 0), 4),
        ("confidence", choice(8, 8, 0), choice(4, 2, 0), 8),
        ("confidence", choice(4, 8, 0, chain=15), choice(2, 1, 0), 4),
        # Chains that are too short for hybrid, and room for any.
        ("hybrid", choice(32, 5, 5), choice(4, 1, 1), 4),
        ("confidence", choice(16, 3, 0), choice(4, 2, 0), 4),
    ],
)
def test_the_step_behind_chains_that_may_be_pending_holds_them(mode, first, second, holding):
    """Nobody waits to see whether they are."""
    session, stats = generate([first, *[second] * 99], mode, 2)
    one = holding > second.width
    calls = session.calls[session.calls.index("adjust") :]
    assert calls[1] == f"run {holding}x{1 if one else 4}" and stats.steps[second.width]


def test_what_was_read_with_nothing_under_way_is_all_that_is_pending():
    model = FakeModel(quality=right_but_unsure)
    _, stats = generate([choice(32, 8, 8), *[PLAIN] * 99], "hybrid", 1, 40, model)
    assert set(stats.steps) == {32, 1}


@pytest.mark.parametrize("depth", [1, 2])
def test_a_chain_that_does_not_fit_the_bucket_gets_one_that_holds_it(depth):
    # The words allow chains that the narrow bucket cannot hold: they would wait for ever.
    narrow = [choice(2, 8, 0, chain=15)] * 99
    _, stats = generate([choice(16, 8, 0, chain=15), *narrow], "confidence", depth, chunks=(1, 2))
    assert stats.steps[16] and stats.kinds[Kind.UNVERIFIED] > 7
    # What was under way when it showed was idle, and no more.
    assert stats.idle_steps <= 4 * depth


@pytest.mark.parametrize("depth", [1, 2])
def test_chunks_grow_and_stop_where_the_policy_wants_to_be_asked(depth):
    session, _ = generate([PLAIN], "ar", depth)
    runs = [call for call in session.calls if call.startswith("run")]
    assert runs == ["run 1x1", "run 1x2", "run 1x4", *["run 1x8"] * 4, "run 1x1"]
    session, _ = generate([choice(1, 0, 0, most_steps=3)], "ar", depth)
    assert "run 1x4" not in session.calls and session.steps == 40
    assert max(under_way(session.calls)) <= 3


def test_a_choice_for_a_few_steps_counts_its_own():
    """Eight of another one are under way when it is told, and four of it may follow."""
    model, trial = FakeModel(quality=right_but_unsure), choice(4, 1, 1, most_steps=4)
    session, _ = generate([*[PLAIN] * 5, *[trial] * 99], "speculative", 2, 60, model)
    calls = session.calls
    at = calls.index("adjust")
    assert calls[at - 2 : at + 2] == ["run 1x8", "read", "adjust", "run 4x4"]
    assert max(under_way(calls, width=4)) == 4


def under_way(calls, width=None):
    """Steps (of a width) that were enqueued and not read, after each call."""
    chunks = []
    for call in calls:
        if call.startswith("run"):
            ran, steps = map(int, call.removeprefix("run ").split("x"))
            chunks.append(steps if width in (None, ran) else 0)
        elif call == "read":
            chunks.pop(0)
        yield sum(chunks)


@pytest.mark.parametrize("depth", [1, 2])
def test_steps_follow_what_a_step_gives(depth):
    # Nine tokens a step, once drafts are there: few steps stay without work.
    for wanted in range(1, 45):
        _, stats = generate([choice(24, 8, 8)], "speculative", depth, wanted)
        assert stats.forwards <= 2 + wanted // 9
        assert stats.idle_steps <= 2 * depth


@pytest.mark.parametrize("depth", [1, 2])
def test_the_host_leaves_no_gap_where_the_device_works_ahead(depth):
    session, stats = generate([PLAIN], "ar", depth)
    empty = [n for n in list(under_way(session.calls))[2:-1] if n == 0]
    assert bool(empty) == (depth == 1)
    assert 0 < stats.host_gap_seconds < stats.decode_seconds


class Clock:
    """Time that passes when it is told to."""

    def __init__(self, monkeypatch, session):
        self.now = 0.0
        monkeypatch.setattr("bitmtp_tvm.flight.time.perf_counter", lambda: self.now)
        for name, seconds in ("prefill", 1000), ("write", 1), ("run", 10), ("read", 100):
            monkeypatch.setattr(session, name, self.taking(seconds, getattr(session, name)))

    def taking(self, seconds, call):
        def timed(*arguments):
            self.now += seconds
            return call(*arguments)

        return timed


@pytest.mark.parametrize(
    ("depth", "decode", "gap"),
    [
        # Runs of 1, 2 and 1 steps: a write and the time between read and run are gaps.
        (1, 1 + 3 * 110, 1),
        # The caller's time counts while the device works ahead, which it does after two of three.
        (2, 1 + 3 * 110 + 3 * 5000, 1),
    ],
)
def test_the_clock_counts_what_the_decoder_takes(monkeypatch, depth, decode, gap):
    session = TwinSession(depth=depth)
    clock = Clock(monkeypatch, session)
    decoder = Decoder(session, CHEAP_ROWS)
    for prompt in PROMPT, [9, 9]:
        stream = decoder.generate(prompt, stop(4))
        for _ in stream:
            clock.now += 5000
        stats = stream.statistics
        assert (stats.decode_seconds, stats.host_gap_seconds) == (decode, gap)
        assert stats.prefill_seconds == 1000
        # One that is left alone leaves no time behind.
        next(decoder.generate([7, 7], stop(30)))
        clock.now += 10**6
