"""Held-out text: the loss of next tokens, and what mask rows are worth."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from bitmtp_tvm.evaluation.calibration import SURE, Calibration, calibrate
from bitmtp_tvm.evaluation.intervals import Bootstrap, Estimate
from bitmtp_tvm.evaluation.rows import WindowRows


@dataclass(frozen=True)
class Blocks:
    """What the mask rows of the windows did, by place j = 1..K in the block.

    `accuracy`: the likeliest token is that of the text; `agreement`: it is the likeliest of the
    clean row that predicts the same token. `accepted`: the clean row and mask rows 1..j all say
    what the text has. `accepted_length`: 1 + their sum, the tokens that a forward of one block
    gives on natural text. `text`, `ar`: calibration against either.
    """

    anchors: int
    accuracy: list[Estimate]
    agreement: list[Estimate]
    accepted: list[Estimate]
    accepted_length: Estimate
    text: list[Calibration]
    ar: list[Calibration]

    def to_dict(self) -> dict[str, Any]:
        estimates = {
            name: [estimate.to_dict() for estimate in getattr(self, name)]
            for name in ("accuracy", "agreement", "accepted")
        }
        return {
            "anchors": self.anchors,
            **estimates,
            "natural_text_accepted_length": self.accepted_length.to_dict(),
            "sure": SURE,
            "calibration_against_text": [one.to_dict() for one in self.text],
            "calibration_against_ar": [one.to_dict() for one in self.ar],
        }


@dataclass(frozen=True)
class Prediction:
    """A model on windows: loss in nats a token, perplexity, share of likeliest tokens that are
    those of the text; `blocks` is None where no mask row was measured.

    `losses`, `counts` `(N,)`: sum of the loss and predicted tokens of each window.
    """

    model: str
    loss: Estimate
    accuracy: Estimate
    blocks: Blocks | None
    losses: np.ndarray
    counts: np.ndarray

    @property
    def perplexity(self) -> Estimate:
        return self.loss.map(math.exp)

    def to_dict(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "windows": len(self.counts),
            "tokens": int(self.counts.sum()),
            "loss": self.loss.to_dict(),
            "perplexity": self.perplexity.to_dict(),
            "accuracy": self.accuracy.to_dict(),
            "masks": self.blocks.to_dict() if self.blocks else None,
        }


def measure(model: str, windows: Iterable[WindowRows], seed: int) -> Prediction:
    """Add the windows up; `seed` is that of the intervals."""
    found = list(windows)
    bootstrap = Bootstrap(len(found), seed)
    counts = np.array([len(rows.nll) for rows in found], np.float64)
    losses = np.array([rows.nll.sum() for rows in found])
    hits = np.array([(rows.top == rows.tokens[1:]).sum() for rows in found], np.float64)
    return Prediction(
        model,
        bootstrap.ratio(losses, counts),
        bootstrap.ratio(hits, counts),
        _blocks(found, bootstrap),
        losses,
        counts,
    )


def _blocks(found: list[WindowRows], bootstrap: Bootstrap) -> Blocks | None:
    if not found[0].mask_top.size:
        return None
    blocks = [judged(rows) for rows in found]
    anchors = np.array([len(rows.anchors) for rows in found], np.float64)

    def shares(which: int) -> list[Estimate]:
        sums = np.array([block[which].sum(0) for block in blocks], np.float64)
        return [bootstrap.ratio(column, anchors) for column in sums.T]

    accepted = np.array([block[2].sum() for block in blocks], np.float64)
    confidence = np.concatenate([rows.confidence for rows in found])
    right, same = (np.concatenate([block[which] for block in blocks]) for which in (0, 1))
    places = range(confidence.shape[1])
    return Blocks(
        int(anchors.sum()),
        shares(0),
        shares(1),
        shares(2),
        bootstrap.ratio(anchors + accepted, anchors),
        [calibrate(confidence[:, j], right[:, j]) for j in places],
        [calibrate(confidence[:, j], same[:, j]) for j in places],
    )


def judged(rows: WindowRows) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of every mask row, bool `(A, K)`: says what the text has; says what the clean row for that
    token says; the clean row at the anchor and this block up to here say what the text has."""
    _, count = rows.mask_top.shape
    # Mask row j at anchor i and clean row i + j predict token i + j + 1.
    clean = rows.anchors[:, None] + np.arange(1, count + 1)
    right = rows.mask_top == rows.tokens[clean + 1]
    same = rows.mask_top == rows.top[clean]
    first = rows.top[rows.anchors] == rows.tokens[rows.anchors + 1]
    return right, same, first[:, None] & np.logical_and.accumulate(right, axis=1)


@dataclass(frozen=True)
class Cost:
    """What a model's loss is more than a baseline's, on the same windows: nats, and a share."""

    difference: Estimate
    share: Estimate

    def to_dict(self) -> dict[str, Any]:
        return {"loss_difference": self.difference.to_dict(), "share": self.share.to_dict()}


def compare(model: Prediction, baseline: Prediction, seed: int) -> Cost:
    """Paired: every draw takes the same windows of both. Raises `ValueError` for other windows."""
    if not np.array_equal(model.counts, baseline.counts):
        raise ValueError("the two were measured on different windows")
    bootstrap = Bootstrap(len(model.counts), seed)
    sums = model.losses, baseline.losses, model.counts
    return Cost(
        bootstrap.statistic(lambda ours, theirs, count: (ours - theirs) / count, *sums),
        bootstrap.statistic(lambda ours, theirs, count: ours / theirs - 1, *sums),
    )
