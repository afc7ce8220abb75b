import dataclasses
import gc
import math
import threading
import weakref
from contextlib import suppress

import pytest
from fake_model import FakeModel, hashed, right
from following import EXACT, PROMPT, QUALITIES, ask, check_counts, decoder_of, follow, stop
from hypothesis import given, settings
from hypothesis import strategies as st
from twin_session import CHEAP_ROWS, WIDTHS, TwinSession, mtp_of

from bitmtp_tvm.decoder import Decoder
from bitmtp_tvm.errors import BitMTPError
from bitmtp_tvm.modes import MODES, DecodeOptions, resolve


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("mode", MODES)
def test_a_second_turn_gives_what_a_cold_start_gives(mode, depth):
    model = FakeModel(context=128)
    decoder = decoder_of(model, depth=depth)
    first = follow(decoder, ask(decoder, PROMPT, stop(20, 128), mode))
    talk = PROMPT + first
    assert decoder.b == len(talk) - 1 or mode == "confidence"
    for prompt, cached in (
        # An unverified chain was still pending.
        ([*talk, 9, 9], decoder.b),
        ([*talk[:10], 9, 4], 10),
        ([*talk[:10], 9, 4], 11),
        ([8, *PROMPT], 0),
        ([8], 0),
        ([8, *PROMPT, 4], 1),
    ):
        stream = ask(decoder, prompt, stop(15, 128), mode)
        assert stream.statistics.cached_tokens == cached
        start = len(decoder.session.calls)
        assert follow(decoder, stream) == model.continuation(prompt, 15)
        rest = len(prompt) - 1 - cached
        prefills = [f"prefill {cached}+{rest}"] if rest else []
        assert [c for c in decoder.session.calls[start:] if c.startswith("pre")] == prefills


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("mode", MODES)
def test_it_may_be_cancelled_anywhere_and_goes_on_from_there(mode, depth):
    model = FakeModel(quality=hashed(9, 0.9) if mode in EXACT else right)
    whole = model.continuation(PROMPT, 40)
    for read in range(26):
        decoder = decoder_of(model, depth=depth)
        stream = ask(decoder, PROMPT, stop(30), mode)
        tokens = follow(decoder, stream, read)
        if read % 2:
            stream.close()
        else:
            stream.cancel()
            assert next(stream, None) is None
        assert stream.finish_reason == "cancelled" and decoder.session.under_way == 0
        assert tokens == whole[:read] and decoder.tokens == PROMPT + tokens
        assert 0 <= decoder.b < decoder.n and model.holds(decoder.tokens[: decoder.b])
        stats = stream.statistics
        assert stats.new_tokens == sum(stats.kinds.values()) == len(stream.logprobs) == read
        assert list(stream) == []
        # What the device had committed beyond it does not count.
        second = ask(decoder, PROMPT + tokens, stop(10), mode)
        assert follow(decoder, second) == whole[read : read + 10]


def test_cancelling_what_has_ended_changes_nothing():
    decoder = decoder_of()
    stream = ask(decoder)
    tokens = follow(decoder, stream)
    stream.close()
    stream.cancel()
    assert stream.finish_reason == "length" and list(stream) == []
    assert decoder.tokens == PROMPT + tokens


@pytest.mark.parametrize("mode", MODES)
def test_rewind_is_how_the_boundary_falls(mode):
    model = FakeModel()
    decoder = decoder_of(model, depth=2)
    tokens = PROMPT + follow(decoder, ask(decoder, PROMPT, stop(20), mode))
    for n in (20, 20, 7, 1):
        b = decoder.b
        decoder.rewind(n)
        assert decoder.tokens == tokens[:n] and decoder.b == min(b, n - 1)
    with pytest.raises(ValueError, match="2 tokens of 1"):
        decoder.rewind(2)
    decoder.rewind(0)
    assert decoder.tokens == [] and decoder.b == 0
    stream = ask(decoder, PROMPT, stop(20), mode)
    assert PROMPT + follow(decoder, stream) == tokens and stream.statistics.cached_tokens == 0


def test_a_rewind_ends_the_generation_under_way():
    decoder = decoder_of(depth=2)
    stream = ask(decoder, PROMPT, stop(30))
    tokens = follow(decoder, stream, 9)
    decoder.rewind(8)
    assert list(stream) == [] and stream.finish_reason == "cancelled"
    assert decoder.tokens == PROMPT + tokens[:4] and decoder.session.under_way == 0


@pytest.mark.parametrize("read", [0, 1, 8])
@pytest.mark.parametrize("depth", [1, 2])
def test_an_older_sequence_cannot_be_read_on(read, depth):
    decoder = decoder_of(depth=depth)
    older = ask(decoder, [2, 3])
    follow(decoder, older, read)
    newer = ask(decoder)
    first = follow(decoder, newer, 1)
    with pytest.raises(BitMTPError, match="newer one"):
        next(older)
    older.close()
    older.cancel()
    assert list(older) == []
    rest = list(newer)
    assert first + rest == decoder.session.model.continuation(PROMPT, 8)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("done", [True, False])
@pytest.mark.parametrize("call", ["prefill", "write", "adjust", "run", "read"])
def test_after_an_interrupt_the_next_generation_is_right(call, done, depth, monkeypatch):
    """`done`: the interrupt comes after the session has done what it was asked."""
    for after in range(4):
        decoder, left = decoder_of(depth=depth), [after]
        session = decoder.session
        session.strict, real = False, getattr(session, call)

        def interrupted(*arguments, real=real, left=left):
            left[0] -= 1
            if left[0] >= 0:
                return real(*arguments)
            if done:
                real(*arguments)
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(session, call, interrupted)
            with suppress(KeyboardInterrupt):
                list(ask(decoder, PROMPT, stop(20), "speculative"))
                assert left[0] >= 0
        if not done and call == "read" and left[0] < 0:
            # The session pops a snapshot before it waits.
            session.read()
        assert session.model.holds(decoder.tokens[: decoder.b])
        again = [*PROMPT, 4]
        expected = session.model.continuation(again, 20)
        assert list(ask(decoder, again, stop(20), "speculative")) == expected


@pytest.mark.parametrize("mode", ["ar", "speculative", "hybrid"])
def test_an_interrupt_takes_no_tokens_from_a_stream_that_is_read_on(mode, monkeypatch):
    for after in (1, 2, 3):
        decoder, left = decoder_of(depth=2), [after]
        session, real = decoder.session, decoder.session.run

        def interrupted(*arguments, real=real, left=left):
            left[0] -= 1
            if not left[0]:
                raise KeyboardInterrupt
            return real(*arguments)

        monkeypatch.setattr(session, "run", interrupted)
        stream, found = ask(decoder, PROMPT, stop(20), mode), []
        with suppress(KeyboardInterrupt):
            for token in stream:
                found.append(token)
        assert left[0] == 0 and len(found) < 20
        assert found + list(stream) == session.model.continuation(PROMPT, 20)


def test_a_policy_learns_from_one_request_to_the_next():
    decoder = decoder_of()
    options = resolve(mtp_of(decoder.session.model), WIDTHS)
    policy = decoder.policy(options)
    assert decoder.policy(dataclasses.replace(options)) is policy
    assert decoder.policy(DecodeOptions()) is not policy


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("mode", MODES)
def test_an_answer_does_not_depend_on_those_before(mode, depth):
    decoder = decoder_of(FakeModel(context=96, quality=hashed(3, 0.8)), depth=depth)
    first = follow(decoder, ask(decoder, PROMPT, stop(60, 96), mode))
    follow(decoder, ask(decoder, PROMPT + first[:20], stop(60, 96), mode))
    assert follow(decoder, ask(decoder, PROMPT, stop(60, 96), mode)) == first


@st.composite
def turns(draw):
    kind = draw(st.sampled_from(["right", "wrong", "unsure", "last wrong", "random"]))
    model = FakeModel(
        context=draw(st.sampled_from([24, 64])),
        block_size=draw(st.integers(1, 8)),
        bidirectional=draw(st.booleans()),
        quality=QUALITIES[kind],
    )
    widths = draw(st.sampled_from([WIDTHS, (1, 16), (10,), (2, 4, 12), (1, 24, 64)]))
    chunks = draw(st.sampled_from([(1, 2, 4, 8), (1,), (1, 3, 5)]))
    session = TwinSession(model, widths=widths, chunks=chunks, depth=draw(st.integers(1, 2)))
    asked = draw(
        st.lists(
            st.tuples(
                st.sampled_from(MODES),
                st.integers(0, 30),  # tokens kept of the turn before
                st.lists(st.integers(0, 40), max_size=5),
                st.integers(1, 40),  # tokens wanted
                st.sets(st.integers(0, 40), max_size=2),  # end tokens
                st.integers(0, 40) | st.none(),  # tokens read before it is cancelled
            ),
            min_size=1,
            max_size=3,
        )
    )
    return session, asked


@settings(max_examples=150, deadline=None)
@given(turns())
def test_any_talk_keeps_the_contract(case):
    session, asked = case
    model = session.model
    decoder = Decoder(session, CHEAP_ROWS)
    for mode, kept, more, wanted, ends, read in asked:
        prompt = ([*decoder.tokens[:kept], *more] or [3])[: session.context]
        condition = stop(wanted, session.context, ends)
        stream = ask(decoder, prompt, condition, mode)
        tokens = follow(decoder, stream, math.inf if read is None else read)
        expected = model.continuation(prompt, condition.limit(len(prompt)) - len(prompt))
        last = next((i for i, token in enumerate(expected) if token in ends), len(expected))
        if mode in EXACT:
            assert tokens == expected[: last + 1][: read if read is not None else None]
        if read is not None:
            stream.close()
            assert session.under_way == 0 and decoder.tokens == prompt + tokens
        else:
            reason = "stop" if tokens and tokens[-1] in ends else "length"
            assert stream.finish_reason == reason
            assert not set(tokens[:-1]) & ends or mode not in EXACT
            check_counts(stream)


def test_another_thread_is_told_and_disturbs_nothing(monkeypatch):
    decoder = decoder_of()
    session, read = decoder.session, decoder.session.read
    reading, go_on, found = threading.Event(), threading.Event(), []

    def slowly():
        reading.set()
        assert go_on.wait(30)
        return read()

    monkeypatch.setattr(session, "read", slowly)
    stream = ask(decoder)
    reader = threading.Thread(target=lambda: found.extend(stream))
    reader.start()
    assert reading.wait(30)
    for call in (lambda: ask(decoder), lambda: next(stream), lambda: decoder.rewind(0)):
        with pytest.raises(BitMTPError, match="another thread is decoding on this engine"):
            call()
    go_on.set()
    reader.join(30)
    assert found == session.model.continuation(PROMPT, 8)
    assert list(ask(decoder, [*PROMPT, 4])) == session.model.continuation([*PROMPT, 4], 8)


@pytest.mark.parametrize("read", [0, 3, 99])
def test_nothing_outlives_a_decoder(read):
    """A model's memory is given back when its engine goes, not when Python looks for cycles."""
    decoder = decoder_of()
    stream = ask(decoder)
    follow(decoder, stream, read) if read < 99 else list(stream)
    gone = [weakref.ref(decoder), weakref.ref(stream), weakref.ref(decoder.session)]
    gc.collect()
    gc.disable()
    try:
        del decoder, stream
        assert [one() for one in gone] == [None, None, None]
    finally:
        gc.enable()
