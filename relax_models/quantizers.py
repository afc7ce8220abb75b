"""Rules that make low-bit weights of wider ones, group by group along K; numpy only.

Each rule gives back exactly what an already quantised matrix was made of: where all weights of a
group that are not zero share one magnitude, that magnitude is the scale and every code is kept.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from relax_models.formats import FORMATS, K_BLOCK

# Codes `(N, groups, 128)` uint8 and scales `(N, groups)` float64 of weights of the codes' shape.
Rule = Callable[[np.ndarray, float], tuple[np.ndarray, np.ndarray]]


@dataclass(frozen=True)
class Quantizer:
    """A named rule; `format` is the key of FORMATS that it produces."""

    name: str
    format: str
    rule: Rule
    # What the scale of a group is, for the manifest.
    scale: str
    # Ternary rules only: a weight is kept where it is larger than threshold * mean of its group.
    threshold: float | None

    def describe(self) -> str:
        """The rule with its settings, for the manifest."""
        threshold = "" if self.threshold is None else f" threshold {self.threshold:g}"
        return f"{self.format}{threshold} {self.scale}"

    def quantize(self, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Weights `(N, K)` float32, K a multiple of 128 -> codes `(N, K)` uint8, scales
        `(N, K / 128)` float16.

        Raises ValueError for another K, for a weight that is not finite, and for a scale that
        float16 cannot hold.
        """
        n, k = weights.shape
        if k % K_BLOCK:
            raise ValueError(f"rows of {k} weights do not divide into groups of {K_BLOCK}")
        grouped = np.asarray(weights, np.float32).reshape(n, k // K_BLOCK, K_BLOCK)
        if not np.isfinite(grouped).all():
            raise ValueError("a weight is not finite")
        codes, exact = self.rule(grouped, self.threshold or 0.0)
        if exact.max(initial=0) >= _FLOAT16_OVERFLOW:
            raise ValueError(f"the scale {exact.max():g} is too large for float16")
        scales = exact.astype(np.float16)
        if FORMATS[self.format].bits == 2:
            # A group whose scale vanishes in float16 is zero, and says so.
            codes[scales == 0] = 1
        return codes.reshape(n, k), scales


# From here on float16 rounds to infinity.
_FLOAT16_OVERFLOW = 65520.0


def _binary(weights: np.ndarray, _: float) -> tuple[np.ndarray, np.ndarray]:
    """w -> sign(w) * mean|w|, where 0 counts as positive."""
    return (weights >= 0).astype(np.uint8), _mean(np.abs(weights))


def _ternary(weights: np.ndarray, threshold: float) -> tuple[np.ndarray, np.ndarray]:
    """w -> sign(w) * d where |w| > threshold * mean|w|, else 0; d = the mean of the |w| kept.

    That d is the best one for these codes in the sense of least squares.
    """
    magnitude = np.abs(weights)
    kept = magnitude > (threshold * _mean(magnitude)).astype(np.float32)[..., None]
    return _signed(weights, kept), _kept_mean(magnitude, kept)


def _ternary_absmean(weights: np.ndarray, threshold: float) -> tuple[np.ndarray, np.ndarray]:
    """As `_ternary`, but d = the mean of all |w| of the group: BitNet's rule, group by group."""
    magnitude = np.abs(weights)
    mean = _mean(magnitude)
    kept = magnitude > (threshold * mean).astype(np.float32)[..., None]
    largest = magnitude.max(axis=-1)
    ready = np.all(~kept | (magnitude == largest[..., None]), axis=-1)
    ready &= np.all(kept | (magnitude == 0), axis=-1)
    return _signed(weights, kept), np.where(ready, largest, mean)


def _mean(magnitude: np.ndarray) -> np.ndarray:
    # float64 holds the sum of 128 equal float32 exactly, so equal magnitudes give just that one.
    return magnitude.mean(axis=-1, dtype=np.float64)


def _kept_mean(magnitude: np.ndarray, kept: np.ndarray) -> np.ndarray:
    total = np.where(kept, magnitude, np.float32(0)).sum(axis=-1, dtype=np.float64)
    return total / np.maximum(kept.sum(axis=-1), 1)


def _signed(weights: np.ndarray, kept: np.ndarray) -> np.ndarray:
    """Ternary codes: 1 for what is not kept, else 2 for positive weights and 0 for negative."""
    return np.uint8(1) + (kept & (weights > 0)) - (kept & (weights < 0))


QUANTIZERS = {
    "binary-g128": Quantizer("binary-g128", "binary-g128", _binary, "absmean", None),
    "ternary-g128": Quantizer("ternary-g128", "ternary-g128", _ternary, "mean of the kept", 0.5),
    "ternary-g128-absmean": Quantizer(
        "ternary-g128-absmean", "ternary-g128", _ternary_absmean, "absmean", 0.5
    ),
}


def get_quantizer(name: str, threshold: float | None = None) -> Quantizer:
    """The rule of a name, with another threshold if one is given.

    Raises ValueError for an unknown rule, a rule without threshold that is given one, and a
    threshold outside (0, 1).
    """
    if name not in QUANTIZERS:
        raise ValueError(f"there is no rule {name!r}; known: {', '.join(QUANTIZERS)}")
    quantizer = QUANTIZERS[name]
    if threshold is None:
        return quantizer
    if quantizer.threshold is None:
        raise ValueError(f"{name} has no threshold")
    if not isinstance(threshold, int | float) or not 0 < threshold < 1:
        raise ValueError(f"the threshold is {threshold!r}; it must lie between 0 and 1")
    return replace(quantizer, threshold=float(threshold))
