import numpy as np
import pytest
from toy_session import ToySession, toy_continuation

from bitmtp_tvm.decoder import Decoder, Statistics
from bitmtp_tvm.errors import BitMTPError, UsageError
from bitmtp_tvm.stopping import StopCondition

PROMPT = [5, 3, 1, 8]


def stop(max_new_tokens=8, context=64, eos=()):
    return StopCondition(frozenset(eos), max_new_tokens, context)


@pytest.mark.parametrize("length", [1, 2, 3, 17])
def test_the_tokens_are_those_of_the_whole_prefix(length):
    prompt = list(range(100, 100 + length))
    decoder = Decoder(ToySession())
    assert list(decoder.generate(prompt, stop())) == toy_continuation(prompt, 8)
    assert decoder.finish_reason == "length"


@pytest.mark.parametrize(
    ("prompt", "calls"),
    [([7], ["decode 0+1", "decode 1+1"]), (PROMPT, ["prefill 0+3", "decode 3+1", "decode 4+1"])],
)
def test_prefill_leaves_the_last_token_pending(prompt, calls):
    session = ToySession()
    list(Decoder(session).generate(prompt, stop(2)))
    assert session.calls == calls


def test_delivered_tokens_are_the_committed_ones_at_every_step():
    session = ToySession()
    decoder = Decoder(session)
    delivered = list(PROMPT)
    for token in decoder.generate(PROMPT, stop(20)):
        delivered.append(token)
        assert delivered == decoder.tokens and decoder.n == len(delivered)
        assert decoder.b == decoder.n - 1
        written = [session.slots[slot] for slot in range(decoder.b)]
        assert written == [(token, slot) for slot, token in enumerate(delivered[:-1])]
        assert decoder.statistics.new_tokens == len(delivered) - len(PROMPT)


@pytest.mark.parametrize("wanted", [1, 2, 7])
def test_max_new_tokens_is_exact(wanted):
    session = ToySession()
    assert len(list(Decoder(session).generate(PROMPT, stop(wanted)))) == wanted
    assert len(session.calls) == 1 + wanted


def test_an_end_token_ends_it_and_is_the_last_committed():
    expected = toy_continuation(PROMPT, 3)
    decoder = Decoder(ToySession())
    assert list(decoder.generate(PROMPT, stop(eos=(expected[2], 8191)))) == expected
    assert decoder.finish_reason == "stop"
    assert decoder.tokens == PROMPT + expected and decoder.b == decoder.n - 1
    assert decoder.statistics.new_tokens == 3


def test_an_end_token_in_the_prompt_does_not_stop():
    prompt = [5, 1, 3, 1]
    assert len(list(Decoder(ToySession()).generate(prompt, stop(4, eos=(1,))))) == 4


@pytest.mark.parametrize("room", [0, 1, 3])
def test_the_context_limits_prompt_and_new_tokens_together(room):
    session = ToySession(context=len(PROMPT) + room)
    decoder = Decoder(session)
    tokens = list(decoder.generate(PROMPT, stop(50, session.context)))
    assert tokens == toy_continuation(PROMPT, room)
    assert decoder.finish_reason == "length" and decoder.n == session.context
    assert len(session.calls) == (1 + room if room else 0)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "no tokens"),
        ([1, 8192], "token id 8192 at place 1 .* 0 to 8191"),
        ([-1, 2], "token id -1 at place 0"),
        ([3] * 65, "has 65 tokens .* context holds 64"),
    ],
)
def test_a_prompt_that_cannot_be_served_is_refused_at_once(prompt, message):
    session = ToySession()
    with pytest.raises(UsageError, match=message):
        Decoder(session).generate(prompt, stop())
    assert session.calls == []


def test_ids_may_be_numpy_integers_and_must_be_integers():
    decoder = Decoder(ToySession())
    numbers = np.array(PROMPT, np.int64)
    assert list(decoder.generate(numbers, stop(3))) == toy_continuation(PROMPT, 3)
    with pytest.raises(UsageError):
        decoder.generate([1.5], stop())


def test_a_stop_beyond_the_session_is_refused():
    with pytest.raises(ValueError, match="room for fewer"):
        Decoder(ToySession(context=8)).generate(PROMPT, stop(context=9))


def test_logits_that_are_not_finite_end_it_with_an_error():
    decoder = Decoder(ToySession(script=lambda seen: -1 if seen == 6 else 40))
    tokens = decoder.generate(PROMPT, stop())
    assert [next(tokens), next(tokens)] == [40, 40]
    with pytest.raises(BitMTPError, match="no finite logit for the token at position 6"):
        next(tokens)
    assert decoder.tokens == [*PROMPT, 40, 40] and decoder.b == 5


def test_a_second_sequence_starts_afresh_even_after_an_abandoned_one():
    decoder = Decoder(ToySession())
    next(decoder.generate([9] * 30, stop()))
    assert list(decoder.generate(PROMPT, stop())) == toy_continuation(PROMPT, 8)
    assert decoder.statistics.prompt_tokens == 4 and decoder.statistics.forwards == 8


@pytest.mark.parametrize("read", [0, 1, 8])
def test_an_older_sequence_cannot_be_read_on(read):
    decoder = Decoder(ToySession())
    older = decoder.generate([2, 3], stop())
    for _ in range(read):
        next(older)
    newer = decoder.generate(PROMPT, stop())
    first = next(newer)
    with pytest.raises(BitMTPError, match="newer one"):
        next(older)
    assert [first, *newer] == toy_continuation(PROMPT, 8)


def test_rate_counts_tokens_and_decode_time_only():
    stats = Statistics(4, 10, 5, prefill_seconds=3.0, decode_seconds=2.0)
    assert stats.to_dict()["tokens_per_second"] == 5.0
    assert Statistics(4).to_dict()["tokens_per_second"] == 0.0


@pytest.mark.parametrize("prompt", [b"hi", None, 5, ["1"]])
def test_what_is_no_list_of_ids_is_refused(prompt):
    with pytest.raises(UsageError, match="a prompt is a text or a list of token ids"):
        Decoder(ToySession()).generate(prompt, stop())


@pytest.mark.parametrize("wanted", [0, 1.5, "4", None])
def test_a_number_of_tokens_is_a_whole_number(wanted):
    with pytest.raises(UsageError, match="max_new_tokens"):
        stop(wanted)
