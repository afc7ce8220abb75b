"""Whether a mask row is right as often as it says: bins of confidence, and what they hold."""

from dataclasses import dataclass
from typing import Any

import numpy as np

BINS = 15
SURE = 0.9
"""The confidence from which decoding commits unverified tokens by default."""


@dataclass(frozen=True)
class Calibration:
    """One place in the block; arrays are `(BINS,)`, bin b holds confidences in (b, b + 1] / BINS.

    `counts`: rows; `confidence`: the sum of theirs; `hits`: right ones. `sure`: rows of at least
    `SURE`, and right ones among them.
    """

    counts: np.ndarray
    confidence: np.ndarray
    hits: np.ndarray
    sure: tuple[int, int]

    @property
    def error(self) -> float:
        """Expected calibration error: Σ n_b / n · |share right in b - mean confidence in b|."""
        total = self.counts.sum()
        return float(np.abs(self.hits - self.confidence).sum() / total) if total else 0.0

    @property
    def right_when_sure(self) -> float | None:
        rows, right = self.sure
        return right / rows if rows else None

    def points(self) -> list[tuple[float, float, int]]:
        """Mean confidence, share right and rows of every bin that holds any."""
        return [
            (float(c / n), float(h / n), int(n))
            for n, c, h in zip(self.counts, self.confidence, self.hits, strict=True)
            if n
        ]

    def to_dict(self) -> dict[str, Any]:
        sure = self.right_when_sure
        return {
            "expected_calibration_error": round(self.error, 6),
            "rows_sure": self.sure[0],
            "right_when_sure": None if sure is None else round(sure, 6),
            "bins": [[round(c, 6), round(h, 6), n] for c, h, n in self.points()],
        }


def calibrate(confidence: np.ndarray, right: np.ndarray) -> Calibration:
    """Sort rows into bins; confidence `(R,)` in [0, 1], right `(R,)` bool."""
    place = np.clip(np.ceil(confidence * BINS).astype(int) - 1, 0, BINS - 1)

    def filled(weights: np.ndarray | None) -> np.ndarray:
        return np.bincount(place, weights, BINS)

    sure = confidence >= SURE
    return Calibration(
        filled(None),
        filled(confidence),
        filled(right.astype(np.float64)),
        (int(sure.sum()), int((sure & right).sum())),
    )
