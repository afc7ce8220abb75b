"""Completions: what speculative may not change, and what the other modes cost."""

import math

import pytest
from fake_model import FakeModel, hashed, right
from scored_session import ScoredSession, masks_of
from twin_session import CHEAP_ROWS, mtp_of

from bitmtp_tvm import engine as engine_module
from bitmtp_tvm.engine import Engine, Parts
from bitmtp_tvm.evaluation.artifact_rows import ArtifactRows
from bitmtp_tvm.evaluation.completions import Sampling, complete
from bitmtp_tvm.evaluation.tables import completion_tables
from bitmtp_tvm.mode_rows import Setting, settings

GREEDY = Sampling()
PROMPTS = [[1, 2, 3], [4, 5], [6, 7, 8]]


@pytest.fixture
def engine(monkeypatch):
    def make(**fake):
        session = ScoredSession(FakeModel(200, **fake), depth=2)
        parts = Parts(session, None, frozenset(), CHEAP_ROWS, mtp_of(session.model))
        monkeypatch.setattr(engine_module, "open_parts", lambda directory, progress, graph: parts)
        return Engine("somewhere")

    return make


def score_of(engine):
    model = engine.session.model
    return ArtifactRows(engine.session, masks_of(model), "fake").nll


def results(engine, sampling=GREEDY, tokens=40):
    wanted = settings((8,), ("auto",))
    return complete(engine, PROMPTS, wanted, sampling, tokens, score_of(engine))


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(0.8, 11)])
def test_speculative_is_ar(engine, sampling):
    plain, _, speculative, _ = results(engine(quality=hashed(5, 0.8)), sampling)
    assert plain.every.row.setting == Setting("ar") and plain.every.prompts == 3
    assert plain.every.identical == speculative.every.identical == 3
    assert plain.every.tokens_per_forward.value == 1 and plain.every.unverified == 0
    assert speculative.every.tokens_per_forward.value > 1.2
    assert speculative.every.against_ar.value == 1 and speculative.every.unverified == 0
    assert speculative.every.perplexity == plain.every.perplexity
    # Nothing loops, so both groups are the same.
    assert speculative.calm.to_dict() == speculative.every.to_dict()


def test_unverified_tokens_cost_their_improbability(engine):
    made = engine(quality=hashed(5, 0.8))
    plain, trusting, *_ = results(made)
    # Greedy choices of the model have the probability 0.9 each.
    assert plain.every.perplexity.value == pytest.approx(1 / 0.9, abs=1e-6)
    model, total, count = made.session.model, 0.0, 0
    for place, prompt in enumerate(PROMPTS):
        made.reset()
        options = {"mode": "confidence", "block_size": 8, "seed": place}
        text = [*prompt, *made.generate(prompt, 40, **options).result().token_ids]
        for at in range(len(prompt), len(text)):
            expected = model.continuation(text[:at], 1)[0] == text[at]
            total -= math.log(0.9 if expected else 0.1 / 49)
            count += 1
    assert count == trusting.every.row.tokens == 120
    assert trusting.every.perplexity.value == pytest.approx(math.exp(total / count), rel=1e-5)
    ratio = trusting.every.perplexity.value * 0.9
    assert trusting.every.against_ar.value == pytest.approx(ratio, rel=1e-5)
    assert trusting.every.against_ar.low <= ratio <= trusting.every.against_ar.high
    assert 0 < trusting.every.unverified < 1 and trusting.every.identical < 3


def test_rows_that_loop_stand_apart(engine):
    # From position 20 on every text repeats one token.
    script = {place: 7 for place in range(20, 200)}
    made = engine(quality=right, script=script)
    found = complete(made, [[1, 2, 3]] * 2, settings((8,), ("auto",)), Sampling(), 80, None)
    assert [one.every.looping for one in found] == [2] * 4
    assert [one.calm for one in found] == [None] * 4
    assert found[0].every.perplexity is None and found[0].every.against_ar is None
    (table,) = completion_tables(found, 80)
    assert table.rows[0][:4] == ["ar", "-", "-", "-"] and table.rows[0][8] == "2/2"
    assert "calm: the 0 of 2 prompts" in table.notes[0]


def test_each_prompt_has_draws_of_its_own(engine):
    made = engine(sharpness=0.3)
    two = complete(made, [[1, 2, 3]] * 2, [Setting("ar")], Sampling(1.0, 3), 30, None)
    again = complete(made, [[1, 2, 3]] * 2, [Setting("ar")], Sampling(1.0, 3), 30, None)
    assert two[0].every.row.tokens == again[0].every.row.tokens == 60
    made.reset()
    texts = [
        made.generate([1, 2, 3], 30, mode="ar", temperature=1.0, seed=seed).result().token_ids
        for seed in (3, 4)
    ]
    assert texts[0] != texts[1]


def test_ar_comes_first(engine):
    with pytest.raises(ValueError, match="first setting must be ar"):
        complete(engine(), PROMPTS, [Setting("hybrid", 8)], Sampling(), 10, None)
