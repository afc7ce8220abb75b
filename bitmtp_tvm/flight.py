"""Chunks of steps under way on the device, and the time that they take."""

import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from bitmtp_tvm.statistics import Statistics
from relax_models.state import Word


class TokenSession(Protocol):
    """What the decoder needs of a session.

    `widths`: decode buckets, `chunks`: step counts that `run` takes, both ascending; `depth`:
    chunks that may be under way.
    """

    @property
    def context(self) -> int: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def widths(self) -> Sequence[int]: ...

    @property
    def chunks(self) -> Sequence[int]: ...

    @property
    def depth(self) -> int: ...

    def prefill(self, tokens: Sequence[int], start: int) -> None:
        """Write the K/V of `tokens` to the slots from `start` on, and wait for it."""

    def write(self, state: np.ndarray, seen: np.ndarray | None = None) -> None:
        """Set the state `(STATE_WORDS,)` int32, and `seen` `(V,)` int32; forgets what is unread."""

    def adjust(self, words: Mapping[Word, int]) -> None:
        """Set single words of the state behind everything enqueued so far; the other words stay as
        the steps leave them."""

    def run(self, width: int, steps: int) -> None:
        """Enqueue steps in the bucket `width`, and a snapshot behind them."""

    def read(self) -> tuple[np.ndarray, np.ndarray]:
        """State and ring of the oldest snapshot that was not read; waits for it."""


class Flight:
    """The chunks that were enqueued and not read back, oldest first.

    Between `begin` and the last `pause` it counts steps and decoding time into the statistics of
    the generation that it flies for.
    """

    def __init__(self, session: TokenSession) -> None:
        self._session = session
        self._chunks: deque[tuple[int, int]] = deque()
        self._statistics = Statistics()
        self._since: float | None = None

    def __len__(self) -> int:
        return len(self._chunks)

    @property
    def steps(self) -> int:
        """Steps under way."""
        return sum(steps for _, steps in self._chunks)

    def begin(self, statistics: Statistics) -> None:
        """Fly for another generation, whose clock starts with `resume`."""
        self.drain()
        self._statistics = statistics

    def write(self, state: np.ndarray, seen: np.ndarray | None) -> None:
        self._session.write(state, seen)

    def adjust(self, words: Mapping[Word, int]) -> None:
        self._session.adjust(words)

    def run(self, width: int, steps: int) -> None:
        self._lap(idle=not self._chunks)
        self._session.run(width, steps)
        self._chunks.append((width, steps))

    def read(self) -> tuple[np.ndarray, np.ndarray]:
        """State and ring after the oldest chunk."""
        # Before waiting: an interrupt must not leave a chunk here that the session has forgotten.
        # One that the session alone knows is forgotten by `write`.
        width, steps = self._chunks.popleft()
        snapshot = self._session.read()
        self._lap(idle=False)
        self._statistics.steps[width] += steps
        return snapshot

    def drain(self) -> None:
        """Wait for all chunks, and leave unread what they say; the clock stops."""
        self._since = None
        while self._chunks:
            self._chunks.popleft()
            self._session.read()

    def resume(self) -> None:
        """Let the clock run, if it does not."""
        if self._since is None:
            self._since = time.perf_counter()

    def pause(self) -> None:
        """Stop the clock: the caller's time is not the decoder's."""
        self._lap(idle=not self._chunks)
        self._since = None

    def _lap(self, idle: bool) -> None:
        now = time.perf_counter()
        if self._since is not None:
            passed = now - self._since
            self._statistics.decode_seconds += passed
            self._statistics.host_gap_seconds += passed if idle else 0
            self._since = now
