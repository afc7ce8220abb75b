import math

import numpy as np
import pytest
from fake_model import FakeModel, hashed, wrong_at
from following import EXACT, PROMPT, ask, decoder_of, follow, stop

from bitmtp_tvm.sampling import SamplingOptions
from relax_models.state import Kind


@pytest.mark.parametrize("mode", EXACT)
@pytest.mark.parametrize("depth", [1, 2])
def test_a_seed_gives_the_same_tokens_in_ar_and_speculative(mode, depth):
    def draw(seed, mode="ar", depth=1):
        model = FakeModel(sharpness=0.6, quality=hashed(1, 0.9))
        decoder = decoder_of(model, depth=depth)
        decoder.session.greedy = False
        sampling = SamplingOptions(temperature=0.9, top_p=0.95, seed=seed, repetition_penalty=1.2)
        return follow(decoder, ask(decoder, PROMPT, stop(40), mode, sampling))

    assert draw(7, mode, depth) == draw(7)
    assert draw(7) != draw(8) and draw(2**40 + 7) != draw(7)
    greedy = FakeModel().continuation(PROMPT, 40)
    assert draw(7) != greedy


def test_without_a_seed_every_generation_draws_anew():
    decoder = decoder_of(FakeModel(sharpness=0.3))
    decoder.session.greedy = False
    sampling = SamplingOptions(temperature=1.0)
    draws = [tuple(ask(decoder, PROMPT, stop(30), sampling=sampling)) for _ in range(3)]
    assert len(set(draws)) == 3


@pytest.mark.parametrize("mode", EXACT)
def test_logprobs_are_those_of_the_delivered_tokens(mode):
    decoder = decoder_of(FakeModel(sharpness=0.8), depth=2)
    stream = ask(decoder, PROMPT, stop(30), mode)
    list(stream)
    np.testing.assert_allclose(stream.logprobs, math.log(0.8), rtol=1e-5)


@pytest.mark.parametrize("mode", EXACT)
@pytest.mark.parametrize("turns", [1, 2])
def test_a_repetition_penalty_counts_the_prompt_and_every_new_token(mode, turns):
    decoder, prompt = decoder_of(FakeModel(sharpness=0.8), depth=2), list(PROMPT)
    for penalty in (1.5, 9.0)[:turns]:
        sampling = SamplingOptions(repetition_penalty=penalty)
        stream = ask(decoder, prompt, stop(18), mode, sampling)
        changed = 0
        for token, logprob in zip(stream, stream.logprobs, strict=False):
            before = decoder.tokens[:-1]
            (said,) = decoder.session.model.continuation(before, 1)
            z = decoder.session.model._logits(said, 0.8)
            z[sorted(set(before))] /= penalty
            changed += token != said
            assert token == z.argmax()
            assert logprob == pytest.approx(z[token] - np.log(np.exp(z).sum()), rel=1e-5)
        assert stream.statistics.new_tokens == 18
        assert (changed > 0) == (penalty == 9)
        prompt = list(decoder.tokens)


def test_statistics_say_what_was_accepted():
    decoder = decoder_of(FakeModel(quality=wrong_at([2])))
    stream = ask(decoder, PROMPT, stop(31), "speculative", layout="chain")
    list(stream)
    # A step without drafts, then one with two right ones and a wrong one, and so on; the last one
    # has room for one draft.
    answer = stream.statistics.to_dict()
    assert answer["evaluated"] == [8, 7, 7] and answer["accepted"] == [8, 7, 0]
    assert answer["tokens_by_kind"] == {"target": 16, "draft": 15, "unverified": 0}
    assert answer["forwards"] == 16 and answer["accepted_length"] == round(31 / 16, 3)
    assert answer["steps_by_bucket"] == {"24": 16 + answer["idle_steps"]}
    assert (answer["prompt_tokens"], answer["cached_tokens"], answer["new_tokens"]) == (4, 0, 31)


@pytest.mark.parametrize("depth", [1, 2])
def test_nothing_after_a_cut_is_counted(depth):
    decoder = decoder_of(depth=depth)
    stream = ask(decoder, PROMPT, stop(50), "speculative", layout="chain")
    # The first step gives a token and eight drafts, the next one nine tokens.
    follow(decoder, stream, 4)
    stream.close()
    stats = stream.statistics
    assert (stats.new_tokens, stats.forwards) == (4, 2) and stats.kinds[Kind.DRAFT] == 3
    # Not all of the second chunk was delivered.
    assert stats.evaluated == [] and stats.tokens_per_second > 0
