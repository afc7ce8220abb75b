"""Numbers with intervals: windows (or prompts, or problems) are drawn again, with replacement.

Efron's percentile bootstrap. What is compared is drawn together, so that a difference between two
models on the same windows has the interval of the difference, not of the two.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np

RESAMPLES = 2000
LEVEL = 0.95


@dataclass(frozen=True)
class Estimate:
    """A value and the ends of its 95 % interval, which are None where one unit is all there is."""

    value: float
    low: float | None = None
    high: float | None = None

    def map(self, function: Callable[[float], float]) -> "Estimate":
        """The estimate of `function(value)`, which must rise."""
        ends = [None if end is None else function(end) for end in (self.low, self.high)]
        return Estimate(function(self.value), *ends)

    def to_dict(self) -> dict[str, Any]:
        ends = [None if end is None else round(end, 6) for end in (self.low, self.high)]
        return {"value": round(self.value, 6), "low": ends[0], "high": ends[1]}

    def text(self, digits: int = 3, scale: float = 1.0) -> str:
        """`1.878 (1.861-1.895)`."""
        if self.low is None or self.high is None:
            return f"{scale * self.value:.{digits}f}"
        low, high = (f"{scale * end:.{digits}f}" for end in (self.low, self.high))
        # A minus between two numbers of which one is negative reads badly.
        between = " to " if low.startswith("-") or high.startswith("-") else "-"
        return f"{scale * self.value:.{digits}f} ({low}{between}{high})"


def share(hits: int, trials: int) -> Estimate:
    """A share of independent trials with Wilson's interval, which has a width at 0 and at 1 too."""
    if trials < 1:
        raise ValueError("nothing was tried")
    p, z = hits / trials, NormalDist().inv_cdf((1 + LEVEL) / 2)
    middle = (p + z * z / (2 * trials)) / (1 + z * z / trials)
    half = z / (1 + z * z / trials) * math.sqrt(p * (1 - p) / trials + (z / trials) ** 2 / 4)
    return Estimate(p, max(0.0, middle - half), min(1.0, middle + half))


class Bootstrap:
    """The same draws for everything that is measured on the same `units`."""

    def __init__(self, units: int, seed: int) -> None:
        if units < 1:
            raise ValueError("nothing to draw from")
        self.units = units
        rng = np.random.default_rng(seed)
        # How often each unit is in each draw.
        self._counts = rng.multinomial(units, np.full(units, 1 / units), RESAMPLES)

    def statistic(self, function: Callable[..., Any], *sums: np.ndarray) -> Estimate:
        """`function` of the sums over all units; `sums`: each `(units,)`, one value a unit.

        `function` takes the sums as arrays of any one shape and gives an array of that shape; draws
        in which it is not finite (nothing to divide by) are left out.
        """
        if any(array.shape != (self.units,) for array in sums):
            raise ValueError(f"{[array.shape for array in sums]} are not {self.units} values each")
        value = float(function(*(np.asarray(array.sum(), np.float64) for array in sums)))
        if self.units == 1:
            return Estimate(value)
        with np.errstate(divide="ignore", invalid="ignore"):
            drawn = np.asarray(function(*(self._counts @ array for array in sums)))
        drawn = drawn[np.isfinite(drawn)]
        low, high = np.quantile(drawn, ((1 - LEVEL) / 2, (1 + LEVEL) / 2)).tolist()
        return Estimate(value, low, high)

    def ratio(self, numerators: np.ndarray, denominators: np.ndarray) -> Estimate:
        """The sum of the numerators over that of the denominators."""
        return self.statistic(lambda n, d: n / d, numerators, denominators)
