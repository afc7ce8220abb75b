import numpy as np
import pytest
from fake_model import VOCAB, FakeModel, ending, hashed
from following import EXACT, PROMPT, QUALITIES, ask, check_counts, decoder_of, follow, stop
from twin_session import CHEAP_ROWS, TwinSession

from bitmtp_tvm.decoder import Decoder
from bitmtp_tvm.errors import BitMTPError, UsageError
from bitmtp_tvm.modes import MODES
from relax_models.state import RING, Kind


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("length", [1, 2, 3, 17])
def test_the_tokens_are_those_of_the_whole_prefix(length, mode, depth):
    prompt = [token % 40 for token in range(7, 7 + length)]
    decoder = decoder_of(depth=depth)
    stream = ask(decoder, prompt, stop(30), mode)
    assert follow(decoder, stream) == decoder.session.model.continuation(prompt, 30)
    assert stream.finish_reason == "length"
    check_counts(stream)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("layout", ["auto", "chain", "outcomes"])
@pytest.mark.parametrize("quality", QUALITIES)
def test_speculative_says_what_ar_says_whatever_the_drafts(quality, layout, depth):
    model = FakeModel(quality=QUALITIES[quality])
    decoder = decoder_of(model, depth=depth)
    stream = ask(decoder, PROMPT, stop(40), "speculative", layout=layout)
    assert follow(decoder, stream) == model.continuation(PROMPT, 40)
    assert stream.statistics.kinds[Kind.UNVERIFIED] == 0
    check_counts(stream)


@pytest.mark.parametrize("mode", MODES)
def test_prefill_leaves_the_last_token_pending(mode):
    for prompt, prefill in ([7], []), (PROMPT, ["prefill 0+3"]):
        session = TwinSession()
        follow(decoder := Decoder(session, CHEAP_ROWS), ask(decoder, prompt, stop(1), mode))
        assert session.calls[: len(prefill) + 1] == [*prefill, "write"]
        assert session.calls[-1] == "read"


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("mode", MODES)
def test_wanted_tokens_and_context_are_exact_at_every_offset(mode, depth):
    model = FakeModel(context=40, quality=hashed(2, 0.9))
    whole = follow(decoder := decoder_of(model, depth=depth), ask(decoder, condition=stop(36, 40)))
    for wanted in range(1, 37):
        for condition in stop(wanted, 40), stop(50, len(PROMPT) + wanted):
            decoder = decoder_of(model, depth=depth)
            stream = ask(decoder, PROMPT, condition, mode)
            tokens = follow(decoder, stream)
            assert len(tokens) == wanted and stream.finish_reason == "length"
            assert tokens == whole[:wanted] or mode not in EXACT
            check_counts(stream)


@pytest.mark.parametrize("mode", MODES)
def test_a_full_context_gives_no_token(mode):
    decoder = decoder_of()
    stream = ask(decoder, PROMPT, stop(5, context=4), mode)
    assert list(stream) == [] and stream.finish_reason == "length"
    assert decoder.session.calls == []


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("mode", MODES)
def test_an_end_token_ends_it_at_every_offset_and_is_the_last_committed(mode, depth):
    end = VOCAB - 2
    for place in range(25):
        model = FakeModel(script={len(PROMPT) + place: end})
        expected = model.continuation(PROMPT, 30)
        expected = expected[: expected.index(end) + 1]
        decoder = decoder_of(model, depth=depth)
        stream = ask(decoder, PROMPT, stop(30, eos=(end, 44)), mode)
        expected = expected[: next(i for i, t in enumerate(expected) if t in (end, 44)) + 1]
        assert follow(decoder, stream) == expected
        assert stream.finish_reason == "stop" and stream.statistics.new_tokens == len(expected)
        assert decoder.b == decoder.n - 1
        check_counts(stream)


@pytest.mark.parametrize("mode", MODES)
def test_an_end_token_that_is_only_proposed_ends_nothing(mode):
    end = VOCAB - 2
    model = FakeModel(quality=ending(end, range(5, 40, 3)))
    expected = model.continuation(PROMPT, 30)
    decoder = decoder_of(model)
    stream = ask(decoder, PROMPT, stop(30, eos=(end,)), mode)
    assert end not in expected and follow(decoder, stream) == expected


@pytest.mark.parametrize("mode", MODES)
def test_an_end_token_in_the_prompt_does_not_stop(mode):
    decoder = decoder_of(FakeModel(script=dict(enumerate([7, 9, 7, 9], start=4))))
    assert follow(decoder, ask(decoder, [5, 1, 3, 1], stop(4, eos=(1,)), mode)) == [7, 9, 7, 9]


@pytest.mark.parametrize("mode", MODES)
def test_all_sixteen_end_tokens_are_looked_for(mode):
    for last in 20, 35:
        decoder = decoder_of(FakeModel(script={4: 3, 5: 3, 6: last}))
        stream = ask(decoder, PROMPT, stop(30, eos=range(20, 36)), mode)
        assert follow(decoder, stream) == [3, 3, last] and stream.finish_reason == "stop"


def test_the_next_chunk_is_enqueued_before_the_read_back_of_the_one_before():
    session = TwinSession(depth=2)
    decoder = Decoder(session, CHEAP_ROWS)
    follow(decoder, ask(decoder, PROMPT, stop(40)))
    runs = ["run 1x1", "run 1x2", "read", "run 1x4", "read", "run 1x8", "read", "run 1x8", "read"]
    assert session.calls[2 : 2 + len(runs)] == runs


@pytest.mark.parametrize(("depth", "ahead"), [(1, []), (2, ["run 1x4"])])
def test_the_device_works_ahead_before_a_token_is_delivered_or_delivers_at_once(depth, ahead):
    session = TwinSession(depth=depth)
    decoder = Decoder(session, CHEAP_ROWS)
    stream = ask(decoder, PROMPT, stop(40))
    next(stream)
    assert session.calls[2:] == ["run 1x1", *["run 1x2"] * (depth - 1), "read", *ahead]


@pytest.mark.parametrize("depth", [1, 2])
def test_no_more_steps_run_than_tokens_are_wanted(depth):
    for wanted in range(1, 40):
        session = TwinSession(depth=depth)
        decoder = Decoder(session, CHEAP_ROWS)
        follow(decoder, ask(decoder, PROMPT, stop(wanted)))
        assert session.steps == wanted


@pytest.mark.parametrize("depth", [1, 2])
def test_the_ring_goes_round(depth):
    prompt = [token % 47 for token in range(RING - 20)]
    model = FakeModel(context=RING + 100)
    decoder = decoder_of(model, depth=depth)
    stream = ask(decoder, prompt, stop(45, RING + 100), "speculative", layout="chain")
    assert list(stream) == model.continuation(prompt, 45)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "no tokens"),
        ([1, VOCAB], f"token id {VOCAB} at place 1 .* 0 to {VOCAB - 1}"),
        ([-1, 2], "token id -1 at place 0"),
        ([3] * 65, "has 65 tokens .* context holds 64"),
        (b"hi", "a prompt is a text or a list of token ids"),
        (None, "a prompt is a text or a list of token ids"),
        (5, "a prompt is a text or a list of token ids"),
        (["1"], "a prompt is a text or a list of token ids"),
        ([1.5], "a prompt is a text or a list of token ids"),
    ],
)
def test_a_prompt_that_cannot_be_served_is_refused_at_once(prompt, message):
    decoder = decoder_of()
    first = follow(decoder, ask(decoder))
    calls = list(decoder.session.calls)
    with pytest.raises(UsageError, match=message):
        decoder.generate(prompt, stop())
    assert decoder.session.calls == calls and decoder.tokens == PROMPT + first


def test_ids_may_be_numpy_integers():
    decoder = decoder_of()
    expected = decoder.session.model.continuation(PROMPT, 3)
    assert list(decoder.generate(np.array(PROMPT, np.int64), stop(3))) == expected
    assert all(type(token) is int for token in decoder.tokens)


def test_a_stop_beyond_the_session_is_refused():
    with pytest.raises(ValueError, match="room for fewer"):
        decoder_of(FakeModel(context=8)).generate(PROMPT, stop(context=9))


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("mode", MODES)
def test_logits_that_are_not_finite_end_it_with_an_error_at_every_offset(mode, depth):
    for place in range(4, 20):
        model = FakeModel(script={place: -1})
        decoder = decoder_of(model, depth=depth)
        stream = ask(decoder, PROMPT, stop(30), mode)
        whole = PROMPT + model.continuation(PROMPT, 30)[:-1]
        for _ in range(2):
            with pytest.raises(BitMTPError, match="no finite logit for the token") as caught:
                follow(decoder, stream)
        # A step that meets it commits nothing, drafts before it included.
        n = decoder.n
        assert f"at position {n}:" in str(caught.value) and decoder.tokens == whole[:n]
        assert n == place or (mode not in ("ar", "confidence") and n > place - 9)
        assert len(stream.logprobs) == n - 4 and stream.finish_reason is None
        model.script.clear()
        again = ask(decoder, PROMPT, stop(20), mode)
        assert follow(decoder, again) == model.continuation(PROMPT, 20)
