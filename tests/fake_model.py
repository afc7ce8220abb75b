"""A model without weights for the rows of a decode step: what a row says depends on what it sees.

Each K/V slot holds the token, the position and a digest of everything that its row saw, so a wrong
boundary, position, view or stale slot changes the tokens from there on; a slot that nobody wrote is
an error. Target rows say the next token, a hash of the sequence. Mask rows follow the sequence and
propose what a `Quality` makes of the true token.
"""

import hashlib
import math
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from bitmtp_tvm.reference.step import StepRows
from relax_models.state import MOST_ROWS

VOCAB = 50

# From the position of the proposed token, its place j in the block and the true token to the
# proposal and its softmax probability; token -1: the row has no finite logit.
Quality = Callable[[int, int, int], tuple[int, float]]


def right(position: int, offset: int, token: int) -> tuple[int, float]:
    return token, 0.99


def right_but_unsure(position: int, offset: int, token: int) -> tuple[int, float]:
    return token, 0.2


def wrong(position: int, offset: int, token: int) -> tuple[int, float]:
    """Another token of a vocabulary of `VOCAB`, whose last one is the mask token."""
    return (token + 1 + position % 7) % (VOCAB - 1), 0.99


def wrong_at(offsets: Sequence[int]) -> Quality:
    """Right but for the given places of a block."""
    return lambda position, offset, token: (wrong if offset in offsets else right)(
        position, offset, token
    )


def hashed(seed: int, share: float = 0.7) -> Quality:
    """Right in about `share` of the places, with confidences far from 0.5 and 0.9."""

    def propose(position: int, offset: int, token: int) -> tuple[int, float]:
        dice = _digest(seed, position, offset)
        confidence = (0.2, 0.7, 0.7, 0.97, 0.97, 0.97)[dice // 1000 % 6]
        good = dice % 1000 < share * 1000
        return (token if good else wrong(position, offset, token)[0]), confidence

    return propose


def ending(end: int, positions: Sequence[int], quality: Quality = right) -> Quality:
    """`quality`, but the token `end` is proposed for the given positions."""
    return lambda position, offset, token: (
        (end, 0.99) if position in positions else quality(position, offset, token)
    )


class Slot(NamedTuple):
    """K/V of one slot; the digest is of the row that wrote it and of all that the row saw."""

    token: int
    position: int
    digest: int


class FakeModel:
    """K/V storage and forward; the mask token is the last one, and the sequence never has it.

    `script`: position -> token, replaces the hash there; -1: no finite logit. `sharpness`: the
    softmax probability of a target row's token. Behind the slots of the context there are as many
    as the widest step has rows.
    """

    def __init__(
        self,
        context: int = 64,
        vocab_size: int = VOCAB,
        *,
        block_size: int = 8,
        bidirectional: bool = False,
        quality: Quality = right,
        script: Mapping[int, int] | None = None,
        sharpness: float = 0.9,
        slots: int | None = None,
    ) -> None:
        self.context, self.vocab_size = context, vocab_size
        self.mask_token = vocab_size - 1
        self.block_size, self.bidirectional = block_size, bidirectional
        self.quality, self.sharpness = quality, sharpness
        self.script = dict(script or {})
        self.slots = context + MOST_ROWS if slots is None else slots
        self._kv: list[Slot | None] = [None] * self.slots

    def continuation(self, prefix: Sequence[int], count: int) -> list[int]:
        """The next `count` tokens after `prefix`: what any correct decoder must produce.

        It ends with -1 where there is no finite logit.
        """
        digests = self.causal(prefix)
        last, total = digests[-1], sum(digests)
        made: list[int] = []
        for position in range(len(prefix), len(prefix) + count):
            made.append(self._next(last, position))
            if made[-1] < 0:
                break
            last = _digest(total, position, position, position, made[-1])
            total += last
        return made

    def causal(self, tokens: Sequence[int]) -> list[int]:
        """Digests that a plain causal forward over `tokens` writes to the slots 0, 1, …."""
        digests: list[int] = []
        total = 0
        for place, token in enumerate(tokens):
            digests.append(_digest(total, place, place, place, token))
            total += digests[-1]
        return digests

    def holds(self, tokens: Sequence[int]) -> bool:
        """Whether the slots 0, 1, … hold what a plain causal forward over `tokens` writes."""
        wanted = zip(tokens, range(len(tokens)), self.causal(tokens), strict=True)
        return self._kv[: len(tokens)] == [Slot(*slot) for slot in wanted]

    def prefill(self, tokens: Sequence[int], start: int) -> None:
        """Write K/V of `tokens` to the slots `start`, …, plainly causal."""
        assert len(tokens) > 0
        total = self._sum_below(start)
        for place, token in enumerate(tokens, start=start):
            digest = _digest(total, place, place, place, token)
            self._write(place, Slot(token, place, digest))
            total += digest

    def forward(self, rows: StepRows) -> np.ndarray:
        """Logits `(W, V)` float32 of the rows that ask, NaN elsewhere; writes K/V of every row."""
        boundary = int(rows.boundary[0])
        below, digests = self._sum_below(boundary), []
        logits = np.full((len(rows.tokens), self.vocab_size), np.nan, np.float32)
        for row, sees in enumerate(self._views(rows)):
            token, position = int(rows.tokens[row]), int(rows.position[row])
            clean = [o for o in sees if o != row and rows.tokens[o] != self.mask_token]
            total, count = below + sum(digests[o] for o in clean), boundary + len(clean)
            digests.append(_digest(total, count, boundary + row, position, token))
            self._write(boundary + row, Slot(token, position, digests[row]))
            if rows.logit_rows[row] < 0:
                continue
            assert rows.logit_rows[row] == row
            if token != self.mask_token:
                said = self._next(digests[row], position + 1), self.sharpness
            else:
                self._check_block(rows, row, sees, count)
                last = digests[clean[-1]] if clean else self._slot(boundary - 1).digest
                said = self._propose(total, last, count, position)
            logits[row] = self._logits(*said)
        return logits

    def _views(self, rows: StepRows) -> list[list[int]]:
        """The rows of this step that each row sees, ascending."""
        seen = views(rows.visible)
        for row, view in enumerate(seen):
            assert row in view, f"row {row} does not see itself"
            assert view[-1] < len(rows.tokens), f"row {row} sees row {view[-1]}, which is none"
            if rows.tokens[row] != self.mask_token:
                assert view[-1] == row, f"row {row} is no mask row and sees a later one"
                assert all(rows.tokens[other] != self.mask_token for other in view)
        return seen

    def _slot(self, slot: int) -> Slot:
        found = self._kv[slot] if slot >= 0 else None
        assert found is not None, f"nobody wrote slot {slot}"
        return found

    def _sum_below(self, boundary: int) -> int:
        return sum(self._slot(slot).digest for slot in range(boundary))

    def _write(self, slot: int, what: Slot) -> None:
        assert 0 <= slot < self.slots, f"slot {slot} is past the capacity"
        assert 0 <= what.token < self.vocab_size
        assert 0 <= what.position < self.context, f"position {what.position} is past the context"
        self._kv[slot] = what

    def _check_block(self, rows: StepRows, row: int, sees: list[int], length: int) -> None:
        """The mask rows that `row` sees: one block behind the prefix, complete or up to itself."""
        offset = int(rows.position[row]) - length
        block = [other for other in sees if rows.tokens[other] == self.mask_token]
        count = self.block_size if self.bidirectional else offset + 1
        assert 0 <= offset < count <= self.block_size and len(block) == count
        assert block == list(range(block[0], block[0] + count)) and block[offset] == row
        assert rows.position[block].tolist() == list(range(length, length + count))

    def _propose(self, total: int, last: int, length: int, at: int) -> tuple[int, float]:
        """What a mask row at position `at` proposes behind a prefix of `length` tokens.

        total: the sum of the digests of the prefix; last: the digest of its last token.
        """
        for position in range(length, at + 2):
            token = self._next(last, position)
            last = _digest(total, position, position, position, token)
            total += last
        return self.quality(at + 1, at - length, token)

    def _next(self, digest: int, position: int) -> int:
        """The token at `position` when the row before it has this digest; never the mask token."""
        return self.script.get(position, digest % (self.vocab_size - 1))

    def _logits(self, token: int, confidence: float) -> np.ndarray:
        """Logits `(V,)` whose argmax is `token` and whose largest probability is `confidence`."""
        if token < 0:
            return np.full(self.vocab_size, np.nan, np.float32)
        others = self.vocab_size - 1
        assert 1 / self.vocab_size < confidence < 1
        # Above 0, so that a repetition penalty can put the token below the others.
        logits = np.ones(self.vocab_size, np.float32)
        logits[token] += math.log(confidence / (1 - confidence) * others)
        return logits


def views(visible: np.ndarray) -> list[list[int]]:
    """The rows that each row sees, ascending, from the bits `(W, 2)` uint32."""
    made: list[list[int]] = []
    for low, high in visible.tolist():
        bits = low | high << 32
        made.append([])
        while bits:
            made[-1].append((bits & -bits).bit_length() - 1)
            bits &= bits - 1
    return made


def _digest(*numbers: int) -> int:
    """64 bits that depend on every number, taken modulo 2**64."""
    packed = struct.pack(f"<{len(numbers)}Q", *(number % 2**64 for number in numbers))
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little")
