"""What every step of a decode did, read from the state in front of it and behind it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from bitmtp_tvm.flight import TokenSession
from relax_models.state import RING, Kind, Layout, Ring, Word


@dataclass(frozen=True)
class TracedStep:
    """One step: the rows that went in, and what was committed and drafted.

    `pending`, `drafts`: the tokens of those rows; `masks` rows in each of `blocks` blocks, the rest
    of the bucket `width` is padding. `accepted`: drafts found right, the first ones. `valid`: the
    block whose mask rows counted, None when a wrong draft voided it or there was none.
    `committed`: tokens and how they came about, in order: accepted drafts, the target, unverified
    ones. `proposed`: what the valid block's rows gave the next step, committed unverified or as
    drafts. `length`, `boundary`: n and b before and after.
    """

    width: int
    layout: Layout
    pending: tuple[int, ...]
    drafts: tuple[int, ...]
    masks: int
    blocks: int
    accepted: int
    valid: int | None
    committed: tuple[tuple[int, Kind], ...]
    proposed: tuple[int, ...]
    length: tuple[int, int]
    boundary: tuple[int, int]

    @property
    def padding(self) -> int:
        rows = len(self.pending) + len(self.drafts) + self.masks * self.blocks
        return self.width - rows

    @property
    def unverified(self) -> bool:
        """Whether the proposed tokens were committed, and not drafted."""
        return bool(self.committed) and self.committed[-1][1] == Kind.UNVERIFIED


def traced_step(
    before: np.ndarray, after: np.ndarray, ring: np.ndarray, width: int
) -> TracedStep | None:
    """The step between two states `(STATE_WORDS,)`; ring `(3, RING)` int32 as it was after.

    None for a step that did nothing, after the end.
    """
    pending, drafts, masks, blocks = (int(n) for n in after[Word.ROW_PENDING :][:4])
    if after[Word.FORWARDS] == before[Word.FORWARDS]:
        return None
    lengths = int(before[Word.LENGTH]), int(after[Word.LENGTH])
    columns = np.arange(*lengths) % RING
    tokens, kinds = ring[Ring.TOKEN, columns].tolist(), ring[Ring.KIND, columns].tolist()
    committed = tuple((t, Kind(k)) for t, k in zip(tokens, kinds, strict=True))
    rose = after - before
    accepted = int(rose[Word.ACCEPTED :][:drafts].sum())
    rows = before[Word.TAIL :][: pending + drafts].tolist()
    waiting = after[Word.TAIL + lengths[1] - int(after[Word.BOUNDARY]) :]
    drafted: tuple[int, ...] = tuple(waiting[: int(after[Word.DRAFTS])].tolist())
    unverified = tuple(token for token, kind in committed if kind == Kind.UNVERIFIED)
    return TracedStep(
        width=width,
        layout=Layout(int(after[Word.LAYOUT])),
        pending=tuple(rows[:pending]),
        drafts=tuple(rows[pending:]),
        masks=masks,
        blocks=blocks,
        accepted=accepted,
        # A block is offered once, and the end of the sequence offers none.
        valid=(accepted if blocks > 1 else 0) if rose[Word.OFFERED] else None,
        committed=committed,
        proposed=unverified or drafted,
        length=lengths,
        boundary=(int(before[Word.BOUNDARY]), int(after[Word.BOUNDARY])),
    )


class Recorder:
    """A session around another one that runs one step at a time and keeps each in `steps`."""

    chunks: Sequence[int] = (1,)
    depth = 1

    def __init__(self, session: TokenSession) -> None:
        self.steps: list[TracedStep] = []
        self.context, self.vocab_size = session.context, session.vocab_size
        self.widths = session.widths
        self._session = session
        self._state = np.zeros(0, np.int32)
        self._width = 0

    def prefill(self, tokens: Sequence[int], start: int) -> None:
        self._session.prefill(tokens, start)

    def write(self, state: np.ndarray, seen: np.ndarray | None = None) -> None:
        self._state = state.copy()
        self._session.write(state, seen)

    def adjust(self, words: Mapping[Word, int]) -> None:
        self._session.adjust(words)

    def run(self, width: int, steps: int) -> None:
        self._width = width
        self._session.run(width, steps)

    def read(self) -> tuple[np.ndarray, np.ndarray]:
        state, ring = self._session.read()
        step = traced_step(self._state, state, ring, self._width)
        if step:
            self.steps.append(step)
        self._state = state.copy()
        return state, ring
