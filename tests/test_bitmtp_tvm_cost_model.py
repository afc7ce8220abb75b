"""The cost model: what it learns from an analytic card, and what it may call its records."""

import math
import sys
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from bitmtp_tvm.cost_model import CostModel, Sample, features, learnt_from
from bitmtp_tvm.errors import BitMTPError
from bitmtp_tvm.records import Key, Record, Records
from bitmtp_tvm.targets import TARGETS
from bitmtp_tvm.tune import main

H200, H20 = TARGETS["h200"], TARGETS["h20"]
SHAPES = [(3840, 2560), (2560, 2560), (13824, 2560), (2560, 6912), (6144, 4096)]
LEARNT = (1, 4, 8, 32, 64)
UNSEEN = 16
TILES = [
    {"warps": w, "row_tiles": r, "token_tiles": t, "ahead": a}
    for w, r, t, a in product((4, 8, 16), (1, 2, 4), (1, 2, 4), (1, 4))
]
RULE = TILES[0]


def key(n, k, width):
    return Key("low_bit_linear", "bitnet-ternary", n, k, width, False, True)


def card_seconds(sample):
    """A card as one would sketch it: blocks run in waves, few bytes in flight read slowly, and rows
    that nobody asked for are computed all the same."""
    tile, card, about = sample.arguments, sample.target, sample.key
    rows, tokens = 16 * tile["row_tiles"], 8 * tile["token_tiles"]
    blocks = math.ceil(about.n / rows) * math.ceil(about.width / tokens)
    threads = 32 * tile["warps"]
    resident = card.multiprocessors * (2048 // threads)
    waves = math.ceil(blocks / resident)
    busy = min(blocks, resident)
    flight = busy * threads * 16 * tile["ahead"] * tile["row_tiles"]
    rate = card.bandwidth_gbs * 1e9 * min(1.0, flight / (card.multiprocessors * 40_000))
    reading = about.n * about.k / 4 / rate
    work = about.k * rows * tokens * waves * resident
    return 1e-6 + reading + work / (card.multiprocessors * 2e12) + 1e-7 * waves


def samples(widths, target=H200):
    return [
        Sample(key(n, k, width), "low_bit_mma", tile, target)
        for (n, k), width, tile in product(SHAPES, widths, TILES)
    ]


@pytest.fixture(scope="module")
def model():
    rng = np.random.default_rng(5)
    noisy = [(s, card_seconds(s) * math.exp(rng.normal(0, 0.02))) for s in samples(LEARNT)]
    return CostModel.fit(noisy), noisy


def ranks(values):
    return np.argsort(np.argsort(values)).astype(float)


@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_an_unseen_width_is_ranked_well(model, n, k):
    found = [s for s in samples((UNSEEN,)) if (s.key.n, s.key.k) == (n, k)]
    predicted = model[0].seconds(found)
    true = [card_seconds(s) for s in found]
    assert np.corrcoef(ranks(predicted), ranks(true))[0, 1] > 0.9
    chosen = true[int(np.argmin(predicted))]
    assert chosen < card_seconds(Sample(key(n, k, UNSEEN), "low_bit_mma", RULE, H200))
    assert chosen < 1.15 * min(true)


def test_another_card_is_ranked_by_its_own_figures(model):
    found = samples((8,), H20)
    predicted, true = model[0].seconds(found), [card_seconds(s) for s in found]
    assert np.corrcoef(ranks(predicted), ranks(true))[0, 1] > 0.8
    assert features(found[0])["waves"] >= features(samples((8,))[0])["waves"]


def test_equal_records_give_equal_models(model):
    found = samples((UNSEEN,))[:40]
    again = CostModel.fit(model[1])
    assert model[0].seconds(found) == again.seconds(found)


def test_what_was_not_measured_teaches_nothing():
    record = Record(key(64, 128, 1), "t", {"warps": 4}, 1e-6, "measured", "h200")
    guess = replace(record, seconds=None, provenance="rule")
    found = learnt_from([(record, H200), (guess, H200)])
    assert [(s.arguments, seconds) for s, seconds in found] == [({"warps": 4}, 1e-6)]
    with pytest.raises(BitMTPError, match="1 measured kernels are too few to learn from"):
        CostModel.fit(found)


def test_without_xgboost_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "xgboost", None)
    measured = [(s, 1e-6) for s in samples((1,))[:20]]
    with pytest.raises(BitMTPError, match=r"needs xgboost, which is not here: pip install .*tune"):
        CostModel.fit(measured)


@pytest.fixture
def found():
    """Tasks of a model without the model: one of a width that was measured, one that was not."""
    from types import SimpleNamespace

    from tuning_folder import task

    def one(width):
        item = replace(task(f"w{width}", width), key=key(13824, 2560, width))
        template = SimpleNamespace(name="low_bit_mma")
        choices = [SimpleNamespace(template=template, arguments=lambda t=t: t) for t in TILES]
        return SimpleNamespace(task=item, choices=tuple(choices))

    return [one(8), one(UNSEEN)]


def builds_without(spills):
    """A compiler for which some tiles spill."""
    from bitmtp_tvm.tuning_build import Built
    from bitmtp_tvm.tuning_plan import Candidate

    def builds(wanted):
        return [
            Built(w, None if spills(w.arguments) else Candidate(w.function, "", "", {}))
            for w in wanted
        ]

    return builds


@pytest.mark.parametrize(("target", "provenance"), [("h20", "transferred"), ("3090", "rule")])
def test_predicted_records_are_never_called_measured(model, found, tmp_path, target, provenance):
    from bitmtp_tvm.tuning_predict import predict

    card = TARGETS[target]
    count = predict(found, card, "h200", model[0], tmp_path, builds_without(lambda tile: False))
    assert count == 2
    for item in found:
        (record,) = Records.read(tmp_path).of(item.task.key)
        assert (record.provenance, record.source, record.seconds) == (provenance, "h200", None)
        tiles = [Sample(item.task.key, "low_bit_mma", tile, card) for tile in TILES]
        best = TILES[int(np.argmin(model[0].seconds(tiles)))]
        assert record.arguments == best
    # The next in the ranking where the first spills.
    predict(found, card, "h200", model[0], tmp_path, builds_without(lambda tile: tile == best))
    (record,) = Records.read(tmp_path).of(found[1].task.key)
    assert record.arguments != best


def test_which_template_serves_is_not_predicted(model, found, tmp_path):
    """Of another template than the rule's no tile wins, however fast it is taken to be."""
    from types import SimpleNamespace

    from bitmtp_tvm.tuning_predict import predict

    best = min(TILES, key=lambda t: card_seconds(Sample(found[0].task.key, "", t, H20)))
    slow, other = found[0].choices[0], SimpleNamespace(name="low_bit_gemv")
    beyond = SimpleNamespace(template=other, arguments=lambda: best)
    task = SimpleNamespace(task=found[0].task, choices=(slow, beyond))
    assert predict([task], H20, "h200", model[0], tmp_path, builds_without(lambda t: False)) == 1
    (record,) = Records.read(tmp_path).of(task.task.key)
    assert (record.template, record.arguments) == ("low_bit_mma", TILES[0])


def test_a_measurement_of_the_card_itself_stays(model, found, tmp_path):
    from bitmtp_tvm.tuning_predict import predict

    mine = Record(found[0].task.key, "low_bit_mma", TILES[3], 2e-6, "measured", "h20")
    records = Records.read(tmp_path)
    records.put([mine])
    records.write(tmp_path, None)
    builds = builds_without(lambda tile: False)
    assert predict(found, H20, "h200", model[0], tmp_path, builds) == 1
    assert Records.read(tmp_path).of(found[0].task.key) == [mine]


def test_candidates_are_ranked_behind_the_rule_s(model, found):
    from bitmtp_tvm.tuning_predict import ranked

    plain = ranked(found[0], H200, None)
    assert [c.arguments() for c in plain] == TILES
    by_model = ranked(found[0], H200, model[0])
    assert by_model[0].arguments() == RULE and len(by_model) == len(TILES)
    seconds = [
        card_seconds(Sample(found[0].task.key, "low_bit_mma", c.arguments(), H200))
        for c in by_model[1:]
    ]
    assert np.mean(seconds[:8]) < np.mean(seconds[-8:])


def test_nothing_to_learn_from_is_said(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("bitmtp_tvm.tuning_run.tuning_folder", lambda name: tmp_path / name)
    assert main(["--target", "h20", "--predict", "--from", "h200"]) == 1
    assert "h200 holds nothing measured: tune h200 first" in capsys.readouterr().err
