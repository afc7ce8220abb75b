"""A session without a model: the next token is a hash of all (slot, token, position) it sees.

A wrong boundary, position, prefill start or row changes the tokens, and slots that nobody wrote
are an error.
"""

import hashlib
from collections.abc import Callable, Sequence

import numpy as np

DEMO_VOCAB = 8192


def toy_next(prefix: Sequence[int], vocab_size: int = DEMO_VOCAB) -> int:
    """The token after `prefix`: what any correct decoder must produce."""
    return _hash([(slot, token, slot) for slot, token in enumerate(prefix)], vocab_size)


def toy_continuation(prompt: Sequence[int], count: int, vocab_size: int = DEMO_VOCAB) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(toy_next(tokens, vocab_size))
    return tokens[len(prompt) :]


class ToySession:
    """`script`, when given, replaces the hash: from the number of tokens seen to the next token."""

    def __init__(
        self,
        context: int = 64,
        vocab_size: int = DEMO_VOCAB,
        script: Callable[[int], int] | None = None,
    ) -> None:
        self.context = context
        self.vocab_size = vocab_size
        self.script = script
        self.slots: dict[int, tuple[int, int]] = {}
        self.calls: list[str] = []

    def prefill(self, tokens: Sequence[int], start: int) -> None:
        assert len(tokens) > 0
        self.calls.append(f"prefill {start}+{len(tokens)}")
        for place, token in enumerate(tokens, start=start):
            self._write(place, token, place)

    def decode(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        boundary: int,
        visible: np.ndarray | None,
        logit_rows: Sequence[int],
    ) -> np.ndarray:
        assert visible is None and len(tokens) == len(positions)
        self.calls.append(f"decode {boundary}+{len(tokens)}")
        for row, (token, position) in enumerate(zip(tokens, positions, strict=True)):
            self._write(boundary + row, token, position)
        return np.array([self._target(boundary + row) for row in logit_rows], np.int32)

    def _write(self, slot: int, token: int, position: int) -> None:
        assert 0 <= slot < self.context and 0 <= token < self.vocab_size
        self.slots[slot] = (token, position)

    def _target(self, last: int) -> int:
        seen = [(slot, *self.slots[slot]) for slot in range(last + 1)]
        return self.script(last + 1) if self.script else _hash(seen, self.vocab_size)


def _hash(seen: list[tuple[int, int, int]], vocab_size: int) -> int:
    digest = hashlib.blake2b(repr(seen).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % vocab_size
