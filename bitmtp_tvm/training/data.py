"""Tokens on disk: memory-mapped shards, and the windows of them that a run goes through."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from bitmtp_tvm.checkpoint.jsonfile import read_json
from bitmtp_tvm.errors import BitMTPError


@dataclass(frozen=True)
class Header:
    """The `.json` beside a `.bin`: its element type, its length, and what the ids mean."""

    dtype: str
    tokens: int
    vocabulary: int
    # SHA-256 of the tokenizer.json.
    tokenizer: str
    bos: int | None
    eos: int | None


def write_shard(path: Path, tokens: np.ndarray, header: Header) -> None:
    """Write `path` (`.bin`) and its header; `tokens` `(N,)` of `header.dtype`."""
    path.write_bytes(np.ascontiguousarray(tokens, header.dtype).tobytes())
    path.with_suffix(".json").write_text(json.dumps(asdict(header)))


def narrowest(vocabulary: int) -> str:
    """Element type of the ids of a vocabulary."""
    return "uint16" if vocabulary <= 1 << 16 else "uint32"


class TokenShards:
    """Token shards one after another, memory-mapped: `.bin` files with their headers.

    Raises BitMTPError for a shard without header, of another length, or with another tokenizer
    than the first.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        if not paths:
            raise BitMTPError("there are no token shards")
        headers = [_read_header(path) for path in paths]
        self.header = headers[0]
        for path, header in zip(paths, headers, strict=True):
            if (header.tokenizer, header.vocabulary) != (
                self.header.tokenizer,
                self.header.vocabulary,
            ):
                raise BitMTPError(f"{path} was made with another tokenizer than {paths[0]}")
        self.parts = [
            np.memmap(path, header.dtype, "r", shape=(header.tokens,))
            if header.tokens
            else np.empty(0, header.dtype)
            for path, header in zip(paths, headers, strict=True)
        ]

    @property
    def tokens(self) -> int:
        """Tokens of all shards."""
        return sum(len(part) for part in self.parts)


def _read_header(path: Path) -> Header:
    values = read_json(path.with_suffix(".json"))
    try:
        header = Header(**values)
        size = header.tokens * np.dtype(header.dtype).itemsize
    except TypeError as fault:
        raise BitMTPError(f"{path.with_suffix('.json')} is no header of a shard: {fault}") from None
    if not path.is_file() or path.stat().st_size != size:
        raise BitMTPError(f"{path} does not hold the {header.tokens} tokens its header speaks of")
    return header


class Windows:
    """Windows of `length` tokens in a shuffled order that only `seed` decides; see `windows`."""

    def __init__(self, shards: TokenShards, length: int, seed: int) -> None:
        self._shards, self._length, self._seed = shards, length, seed
        # One window is left free, so that every epoch can begin somewhere else.
        counts = [max(0, len(part) // length - 1) for part in shards.parts]
        if not any(counts):
            counts = [len(part) // length for part in shards.parts]
        self._ends = np.cumsum(counts)
        self._order: tuple[int, np.ndarray, np.ndarray] | None = None
        if not len(self):
            raise BitMTPError(
                f"{shards.tokens} tokens hold no window of {length}: give more data, or a smaller "
                "--length"
            )

    def __len__(self) -> int:
        """Windows of one epoch."""
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> np.ndarray:
        """Window number `index`, from 0 without end: `(length,)` int64."""
        epoch, place = divmod(index, len(self))
        order, offsets = self._epoch(epoch)
        window = int(order[place])
        shard = int(np.searchsorted(self._ends, window, side="right"))
        first = int(self._ends[shard - 1]) if shard else 0
        start = (window - first) * self._length + int(offsets[shard])
        return self._shards.parts[shard][start : start + self._length].astype(np.int64)

    def _epoch(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """The order of the windows in an epoch, and where each shard's first one begins."""
        if self._order is None or self._order[0] != epoch:
            generator = np.random.default_rng([self._seed, epoch])
            order = generator.permutation(len(self))
            counts = np.diff(self._ends, prepend=0)
            spare = [
                len(p) - c * self._length for p, c in zip(self._shards.parts, counts, strict=True)
            ]
            offsets = generator.integers(0, np.maximum(spare, 0) + 1)
            self._order = (epoch, order, np.minimum(offsets, self._length))
        return self._order[1], self._order[2]


def windows(shards: TokenShards, length: int, seed: int) -> Windows:
    """Shuffled windows of `length` tokens: `windows(…)[i]` for any i from 0 on.

    A window lies in one shard; every epoch has another order and other borders. What window i holds
    depends on nothing but the shards, the length and the seed. Raises BitMTPError when no window
    fits.
    """
    return Windows(shards, length, seed)


def anchors_of(index: int, count: int, length: int, block_size: int, seed: int) -> np.ndarray:
    """Anchors of window number `index`: `(count,)` int64, ascending, different where they fit.

    Each leaves room for its block and the token behind it: from 0 to length - block_size - 1.
    """
    places = length - block_size
    generator = np.random.default_rng([seed, 1, index])
    chosen = generator.choice(places, count, replace=count > places)
    return np.sort(chosen).astype(np.int64)
