"""A session without a device: the numpy twin of the decode step around the fake model.

It keeps snapshots in order like a device that works ahead, and is strict about what a device would
not forgive: a state written under way, too many chunks, slots and tokens out of range, a full ring.
"""

from collections import deque
from collections.abc import Mapping, Sequence

import numpy as np
from fake_model import FakeModel

from bitmtp_tvm.reference.choose import choose
from bitmtp_tvm.reference.step import accept, new_state, step_rows
from bitmtp_tvm.step_times import StepTimes
from relax_models.state import (
    MOST_ROWS,
    MOST_STOPS,
    NEVER,
    RING,
    STATE_WORDS,
    Finish,
    Word,
)

MOST_IDLE = 200
WIDTHS = (1, 2, 4, 8, 16, 24, 32, 48, 64)
CHOICE_WORDS = {Word.LAYOUT, Word.MASKS, Word.MOST_DRAFTS, Word.MOST_CHAIN}
CHEAP_ROWS = StepTimes({width: 1 + width / 64 for width in range(1, 65)}, measured=True)
"""Wide steps cost little more than narrow ones, as on a GPU."""


def mtp_of(model: FakeModel) -> dict[str, int | str]:
    """What the manifest of the model says about multi-token prediction."""
    return {
        "block_size": model.block_size,
        "mask_token_id": model.mask_token,
        "label": "next",
        "block_attention": "bidirectional" if model.bidirectional else "causal",
    }


class TwinSession:
    """`calls`: what was asked of it, in order; `steps`: decode steps that ran.

    `greedy`: whether verified tokens are the model's own. `strict`: nobody forgets a chunk.
    """

    def __init__(
        self,
        model: FakeModel | None = None,
        *,
        widths: Sequence[int] = WIDTHS,
        chunks: Sequence[int] = (1, 2, 4, 8),
        depth: int = 1,
    ) -> None:
        self.model = model or FakeModel()
        self.context, self.vocab_size = self.model.context, self.model.vocab_size
        self.widths, self.chunks, self.depth = tuple(widths), tuple(chunks), depth
        self.calls: list[str] = []
        self.greedy, self.strict = True, True
        self.steps = 0
        self.state, self._ring = new_state()
        self._seen = np.full(self.vocab_size, NEVER, np.int32)
        self._unread: deque[tuple[np.ndarray, np.ndarray]] = deque()
        self._length_read = 0

    @property
    def under_way(self) -> int:
        return len(self._unread)

    def prefill(self, tokens: Sequence[int], start: int) -> None:
        self.calls.append(f"prefill {start}+{len(tokens)}")
        assert not self._unread or not self.strict
        assert 0 <= start and start + len(tokens) <= self.context
        self.model.prefill(tokens, start)

    def write(self, state: np.ndarray, seen: np.ndarray | None = None) -> None:
        self.calls.append("write")
        assert not self._unread or not self.strict, "words change under the feet of a chunk"
        self._unread.clear()
        assert state.shape == (STATE_WORDS,) and state.dtype == np.int32
        length, boundary = int(state[Word.LENGTH]), int(state[Word.BOUNDARY])
        assert 0 <= boundary < length < state[Word.LIMIT] <= self.context
        assert state[Word.FINISH] == Finish.RUNNING and 0 <= state[Word.STOPS] <= MOST_STOPS
        tail = state[Word.TAIL :][: length - boundary + state[Word.DRAFTS]]
        assert ((tail >= 0) & (tail < self.vocab_size)).all()
        self.state = state.copy()
        if seen is not None:
            assert seen.shape == (self.vocab_size,) and seen.dtype == np.int32
            self._seen = seen.copy()
        self._length_read = length

    def adjust(self, words: Mapping[Word, int]) -> None:
        # What is under way has run already, and its snapshots are copies.
        self.calls.append("adjust")
        assert words and set(words) <= CHOICE_WORDS
        for word, value in words.items():
            assert 0 <= value < MOST_ROWS
            self.state[word] = value

    def run(self, width: int, steps: int) -> None:
        self.calls.append(f"run {width}x{steps}")
        assert width in self.widths and steps in self.chunks
        assert len(self._unread) < self.depth, "more chunks under way than there is room for"
        for _ in range(steps):
            self._step(width)
        self.steps += steps
        assert self.state[Word.IDLE] < MOST_IDLE, "idle for ever"
        assert self.state[Word.LENGTH] - self._length_read <= RING, "unread tokens are overwritten"
        self._unread.append((self.state.copy(), self._ring.copy()))

    def _step(self, width: int) -> None:
        rows = step_rows(self.state, width)
        logits = self.model.forward(rows)
        chosen = choose(logits, rows.logit_rows, rows.horizon, self.state, self._seen)
        accept(self.state, self._ring, self._seen, *chosen)

    def read(self) -> tuple[np.ndarray, np.ndarray]:
        self.calls.append("read")
        assert self._unread, "nothing is under way"
        state, ring = self._unread.popleft()
        self._length_read = int(state[Word.LENGTH])
        return state, ring
