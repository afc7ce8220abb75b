"""Learns from measured kernels how fast others will be: of other tiles, widths and cards."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bitmtp_tvm.errors import BitMTPError
from bitmtp_tvm.records import Key, Record
from bitmtp_tvm.targets import Target

INSTALL = "pip install -e '.[tune]' in the checkout of this package"
LEAST_RECORDS = 16

# Settings of the regressor: small trees, since records are hundreds and not millions.
ROUNDS = 300
PARAMETERS = {
    "objective": "reg:squarederror",
    "eta": 0.08,
    "max_depth": 6,
    "min_child_weight": 2,
    "subsample": 0.8,
    "colsample_bytree": 0.8,
    "seed": 0,
    # One thread adds up in one order: the same records give the same trees.
    "nthread": 1,
}

BITS = {"binary-g128": 1}
"""Of a code, by format; all others have two."""

HEAD_BITS = 4
"""Of the head's 8-bit table for each of the two codes of an activation, which its k counts."""

WARP = 32
ROWS = 16


@dataclass(frozen=True)
class Sample:
    """A kernel on a card: what it is about, how it is made, and on which target."""

    key: Key
    template: str
    arguments: Mapping[str, int]
    target: Target


def _bits(key: Key) -> int:
    return HEAD_BITS if key.op == "head_codes" else BITS.get(key.format, 2)


def floor_seconds(sample: Sample) -> float:
    """Seconds that reading the codes takes at the data sheet's bandwidth: what speed is relative
    to, so that the model learns how far from it a kernel stays."""
    bits = _bits(sample.key)
    rate = sample.target.bandwidth_gbs * 1e9
    return max(sample.key.n * sample.key.k * bits / 8 / rate, 1e-9) + 1e-6


def features(sample: Sample) -> dict[str, float]:
    """What the model sees, by name: shape, card, tile, and what follows from them."""
    key, card = sample.key, sample.target
    bits = _bits(key)
    size = key.n * key.k * bits / 8
    found = {
        "n": key.n,
        "k": key.k,
        "width": key.width,
        "bits": bits,
        "residual": key.residual,
        "overlap": key.overlap,
        "multiprocessors": card.multiprocessors,
        "bandwidth": card.bandwidth_gbs,
        "l2": card.l2_bytes,
        "registers": card.registers_per_sm,
        "shared": card.shared_memory_per_block,
        f"op {key.op}": 1,
        f"format {key.format}": 1,
        f"template {sample.template}": 1,
        "bytes a multiprocessor": size / max(1, card.multiprocessors),
        "operations a byte": key.width * 8 / bits,
        "operations a second": key.n * key.k * key.width / max(1, card.multiprocessors),
    }
    found |= {f"tile {name}": value for name, value in sample.arguments.items()}
    found |= _derived(sample)
    return {name: float(value) for name, value in found.items()}


def _derived(sample: Sample) -> dict[str, float]:
    """Blocks, threads and waves, as far as the names of a tile's arguments tell."""
    key, tile, card = sample.key, sample.arguments, sample.target
    tokens = tile.get("tokens") or 8 * tile.get("token_tiles", 1)
    rows = ROWS * tile.get("row_tiles", 1)
    blocks = math.ceil(key.n / rows) * math.ceil(key.width / tokens)
    threads = WARP * tile.get("warps", 4)
    # At most 2048 threads, and few enough that each has 32 registers.
    resident = max(1, min(2048, card.registers_per_sm // 32 or 2048) // threads)
    each = blocks / max(1, card.multiprocessors)
    return {
        "blocks": blocks,
        "threads": threads,
        "blocks a multiprocessor": each,
        "waves": math.ceil(each / resident),
        "full last wave": each / resident / max(1, math.ceil(each / resident)),
        "tokens beyond": math.ceil(key.width / tokens) * tokens / key.width,
        "bytes in flight": blocks * threads * 16 * tile.get("ahead", 1) * tile.get("row_tiles", 1),
        "codes a thread": key.n * key.k / max(1, blocks * threads),
    }


class CostModel:
    """Predicted seconds of kernels; only their order means anything."""

    def __init__(self, names: Sequence[str], booster: Any) -> None:
        self._names, self._booster = list(names), booster

    @classmethod
    def fit(cls, measured: Iterable[tuple[Sample, float]]) -> "CostModel":
        """Learn from kernels and their seconds.

        Raises `BitMTPError` where there are too few, and where xgboost is not installed.
        """
        pairs = list(measured)
        if len(pairs) < LEAST_RECORDS:
            raise BitMTPError(
                f"{len(pairs)} measured kernels are too few to learn from, {LEAST_RECORDS} are the "
                "least: measure more with python -m bitmtp_tvm.tune"
            )
        xgboost = load_xgboost()
        rows = [features(sample) for sample, _ in pairs]
        names = sorted({name for row in rows for name in row})
        target = [math.log(seconds / floor_seconds(sample)) for sample, seconds in pairs]
        data = xgboost.DMatrix(_matrix(rows, names), label=np.array(target), feature_names=None)
        return cls(names, xgboost.train(PARAMETERS, data, ROUNDS))

    def seconds(self, samples: Sequence[Sample]) -> list[float]:
        """Predicted seconds of each kernel."""
        if not samples:
            return []
        rows = [features(sample) for sample in samples]
        data = load_xgboost().DMatrix(_matrix(rows, self._names))
        slower = np.exp(self._booster.predict(data))
        return [float(x) * floor_seconds(sample) for x, sample in zip(slower, samples, strict=True)]


def _matrix(rows: Sequence[Mapping[str, float]], names: Sequence[str]) -> np.ndarray:
    """`(rows, names)` float32; a tile argument that a template does not have is missing (NaN)."""
    return np.array([[row.get(name, np.nan) for name in names] for row in rows], np.float32)


def load_xgboost() -> Any:
    """The library; `BitMTPError` that names the extra where it is missing."""
    try:
        import xgboost
    except ImportError as fault:
        raise BitMTPError(f"the cost model needs xgboost, which is not here: {INSTALL}") from fault
    return xgboost


def learnt_from(records: Iterable[tuple[Record, Target]]) -> list[tuple[Sample, float]]:
    """The measured ones of records, each with the target that it was measured on."""
    return [
        (Sample(record.key, record.template, record.arguments, target), record.seconds)
        for record, target in records
        if record.provenance == "measured" and record.seconds
    ]
