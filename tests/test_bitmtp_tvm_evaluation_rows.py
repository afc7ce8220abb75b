"""Rows of windows: the same from PyTorch and from an artifact, laid out as models are trained."""

import math

import numpy as np
import pytest
from fake_model import FakeModel, hashed, wrong_at
from scored_session import FakeDecoder, ScoredSession, masks_of, written

from bitmtp_tvm.errors import BitMTPError, UsageError
from bitmtp_tvm.evaluation import torch_rows
from bitmtp_tvm.evaluation.artifact_rows import ArtifactRows
from bitmtp_tvm.evaluation.prediction import measure
from bitmtp_tvm.evaluation.rows import Masks, choose_anchors, log_softmax
from bitmtp_tvm.evaluation.torch_rows import TorchRows, open_torch, pack


def by_artifact(model, **session):
    return ArtifactRows(ScoredSession(model, **session), masks_of(model), "fake")


def by_torch(model):
    return TorchRows(FakeDecoder(model), "fake")


def windows_of(model, length, firsts):
    return np.array([written(model, length, first) for first in firsts])


def test_anchors_leave_room_for_what_is_predicted():
    found = choose_anchors(50, 14, Masks(4, 9, False), 6, 0)
    assert found.shape == (50, 6)
    assert all(len(set(row)) == 6 and row == sorted(row) for row in found.tolist())
    # Mask row 4 at the last anchor predicts the last token: 8 + 4 + 1.
    assert found.min() == 0 and found.max() == 8
    assert choose_anchors(2, 14, Masks(4, 9, False), 99, 0).tolist() == [list(range(9))] * 2
    assert choose_anchors(3, 14, None, 6, 0).shape == (3, 0)
    with pytest.raises(UsageError, match="--length 6 or more"):
        choose_anchors(1, 5, Masks(4, 9, False), 1, 0)


@pytest.mark.parametrize("make", [by_torch, by_artifact])
def test_known_probabilities_give_known_numbers(make):
    # Clean rows are always right, with 0.9; mask row 3 of 5 is always wrong, all say 0.99.
    model = FakeModel(64, block_size=5, quality=wrong_at((2,)))
    windows = windows_of(model, 24, (1, 2, 3))
    anchors = choose_anchors(3, 24, masks_of(model), 7, 0)
    found = measure("fake", make(model).rows(windows, anchors), 0)
    assert found.loss.value == pytest.approx(-math.log(0.9), abs=1e-6)
    assert found.accuracy.value == 1
    blocks = found.blocks
    assert [one.value for one in blocks.accuracy] == [1, 1, 0, 1, 1]
    assert [one.value for one in blocks.agreement] == [1, 1, 0, 1, 1]
    assert [one.value for one in blocks.accepted] == [1, 1, 0, 0, 0]
    assert blocks.accepted_length.value == 3
    assert blocks.text[0].error == pytest.approx(0.01, abs=1e-6)
    assert blocks.text[2].error == pytest.approx(0.99, abs=1e-6)
    assert blocks.text[0].sure == (21, 21)


@pytest.mark.parametrize("make", [by_torch, by_artifact])
def test_a_token_that_the_model_did_not_expect_costs_its_probability(make):
    model = FakeModel(64, block_size=5)
    text = written(model, 10, 1)
    text[9] = (text[9] + 1) % 40
    nll = make(model).nll(text)
    assert nll[:8] == pytest.approx(-math.log(0.9), abs=1e-6)
    assert nll[8] == pytest.approx(-math.log(0.1 / 49), abs=1e-5)
    assert make(model).nll(text[:1]).shape == (0,)


@pytest.mark.parametrize("bidirectional", [False, True])
def test_both_say_the_same(bidirectional, monkeypatch):
    model = FakeModel(64, block_size=4, bidirectional=bidirectional, quality=hashed(3))
    windows = windows_of(model, 21, (5, 6, 7, 8))
    windows[1, 11] = 3
    anchors = choose_anchors(4, 21, masks_of(model), 6, 1)
    # Several batches, and several blocks of logits.
    monkeypatch.setattr(torch_rows, "ROWS_AT_ONCE", 100)
    monkeypatch.setattr(torch_rows, "LOGITS_AT_ONCE", 500)
    pairs = zip(
        by_torch(model).rows(windows, anchors),
        by_artifact(model, widths=(1, 8)).rows(windows, anchors),
        strict=True,
    )
    for one, other in pairs:
        for name in ("tokens", "top", "anchors", "mask_top"):
            assert getattr(one, name).tolist() == getattr(other, name).tolist()
        assert one.nll == pytest.approx(other.nll, abs=1e-5)
        assert one.confidence == pytest.approx(other.confidence, abs=1e-5)


def test_an_artifact_needs_a_bucket_for_a_block():
    model = FakeModel(64, block_size=4)
    narrow = by_artifact(model, widths=(1, 4))
    windows = windows_of(model, 12, (1,))
    assert len(list(narrow.rows(windows, np.zeros((1, 0), np.int64)))) == 1
    with pytest.raises(UsageError, match="has 4 rows and its mask rows need 5"):
        list(narrow.rows(windows, np.array([[2]])))


def test_a_window_and_its_blocks_are_one_forward():
    windows, masks = np.array([[5, 6, 7, 8, 9]]), Masks(2, 1, False)
    tokens, positions, seen = pack(windows, np.array([[0, 2]]), masks)
    assert tokens.tolist() == [[5, 6, 7, 8, 9, 1, 1, 1, 1]]
    assert positions.tolist() == [[0, 1, 2, 3, 4, 1, 2, 3, 4]]
    assert seen[0, 0, 5:].astype(int).tolist() == [
        [1, 0, 0, 0, 0, 1, 0, 0, 0],
        [1, 0, 0, 0, 0, 1, 1, 0, 0],
        [1, 1, 1, 0, 0, 0, 0, 1, 0],
        [1, 1, 1, 0, 0, 0, 0, 1, 1],
    ]
    assert not seen[0, 0, :5, 5:].any()
    whole = pack(windows, np.array([[2]]), Masks(2, 1, True))[2]
    assert whole[0, 0, 5:, 5:].all()


def test_logarithms_do_not_overflow():
    found = log_softmax(np.array([[1e4, 1e4, -1e4]], np.float32))
    assert found[0, :2] == pytest.approx(-math.log(2)) and found[0, 2] == pytest.approx(-2e4, abs=1)


def test_without_pytorch_a_checkpoint_is_refused(monkeypatch, tmp_path):
    def missing(name):
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(torch_rows, "import_module", missing)
    with pytest.raises(BitMTPError, match="torch is not installed: pip install"):
        open_torch(tmp_path, "cpu", None, None)
