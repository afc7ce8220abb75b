"""Keeps the device in steps for one request: which chunk comes next, and what came back."""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from bitmtp_tvm.flight import Flight, TokenSession
from bitmtp_tvm.modes import DecodeOptions
from bitmtp_tvm.policy import Policy
from bitmtp_tvm.sampling import SamplingOptions
from relax_models.state import NEVER, RING, STATE_WORDS, Finish, Kind, Mode, Ring, Word


class Committed(NamedTuple):
    """A committed token, its log-probability, and how it came about."""

    token: int
    logprob: float
    kind: Kind


def first_state(
    tokens: Sequence[int],
    boundary: int,
    limit: int,
    end_ids: Sequence[int],
    options: DecodeOptions,
    sampling: SamplingOptions,
) -> np.ndarray:
    """The state `(STATE_WORDS,)` int32 of a request that has run no step.

    `tokens`: the prompt, of which the K/V of tokens[:boundary] are there; `limit`: tokens of the
    whole sequence at most.
    """
    state = np.zeros(STATE_WORDS, np.int32)
    words: dict[Word, int] = {
        Word.LENGTH: len(tokens),
        Word.BOUNDARY: boundary,
        Word.LIMIT: limit,
        Word.MODE: Mode[options.mode.upper()],
        Word.MIN_CHAIN: options.min_chain,
        Word.MASK_TOKEN: options.mask_token_id,
        Word.BIDIRECTIONAL: options.bidirectional,
        Word.STOPS: len(end_ids),
        **sampling.words(),
    }
    for word, value in words.items():
        state[word] = value
    floats = state.view(np.float32)
    floats[Word.THRESHOLD], floats[Word.DRAFT_THRESHOLD] = (
        options.threshold,
        options.draft_threshold,
    )
    state[Word.STOP_IDS : Word.STOP_IDS + len(end_ids)] = sorted(end_ids)
    pending = tokens[boundary:]
    state[Word.TAIL : Word.TAIL + len(pending)] = pending
    return state


def first_places(tokens: Sequence[int], vocab_size: int) -> np.ndarray:
    """`seen`: where each token of the vocabulary stands first in `tokens`; `(V,)` int32."""
    seen = np.full(vocab_size, NEVER, np.int32)
    np.minimum.at(seen, np.asarray(tokens), np.arange(len(tokens), dtype=np.int32))
    return seen


def committed(ring: np.ndarray, start: int, end: int) -> Iterator[Committed]:
    """The tokens at the positions from `start` to `end`, out of a ring `(3, RING)` int32."""
    columns = np.arange(start, end) % RING
    tokens, logprobs, kinds = (ring[row, columns] for row in Ring)
    values = tokens.tolist(), logprobs.view(np.float32).tolist(), kinds.tolist()
    for token, logprob, kind in zip(*values, strict=True):
        yield Committed(token, logprob, Kind(kind))


class StepLoop:
    """One request on the device. `state`: as it was last read back, `(STATE_WORDS,)` int32."""

    def __init__(
        self,
        session: TokenSession,
        flight: Flight,
        policy: Policy,
        state: np.ndarray,
        seen: np.ndarray | None,
    ) -> None:
        """`state`, `seen`: where the request begins; `seen` is None where nobody looks at it."""
        self.state = state
        self._session = session
        self._flight = flight
        self._policy = policy
        self._choice = policy.choice()
        self._seen = seen
        # The words of the choice that the device was told last, and the steps enqueued since.
        self._told: dict[Word, int] | None = None
        self._steps_since = 0
        # Rows that may be pending behind everything enqueued.
        self._most_pending = self.pending
        self._chunks_run = 0

    @property
    def finish(self) -> Finish:
        return Finish(self.state[Word.FINISH])

    @property
    def pending(self) -> int:
        return int(self.state[Word.LENGTH] - self.state[Word.BOUNDARY])

    def fill(self) -> None:
        """Enqueue chunks until `depth` are under way, or no further step could be of use."""
        while self.finish == Finish.RUNNING and len(self._flight) < self._session.depth:
            if self._told != self._choice.words:
                self._tell()
            width, steps = self._next_chunk()
            if not steps:
                return
            self._flight.run(width, steps)
            self._most_pending = self._pending_after(width)
            self._steps_since += steps
            self._chunks_run += 1

    def read(self) -> Iterator[Committed]:
        """Wait for the oldest chunk; the tokens that it committed, made only as they are taken."""
        before = int(self.state[Word.LENGTH])
        self.state, ring = self._flight.read()
        if not self._flight:
            self._most_pending = self.pending
        self._choice = self._policy.update(self.state)
        return committed(ring, before, int(self.state[Word.LENGTH]))

    def _tell(self) -> None:
        """Give the device the words of the choice, behind the steps that are under way."""
        words, told = self._choice.words, self._told
        if told is None:
            state = self.state.copy()
            for word, value in words.items():
                state[word] = value
            self._flight.write(state, self._seen)
            # The device keeps it from here on.
            self._seen = None
        else:
            self._flight.adjust(
                {word: value for word, value in words.items() if value != told[word]}
            )
        self._told, self._steps_since = words, 0

    def _pending_after(self, width: int) -> int:
        """Rows that a step of the choice in this bucket leaves pending at most."""
        # The last verified token, and the unverified chain behind it.
        chain = min(self._choice.most_chain, self._choice.masks, width - 1)
        mode = self.state[Word.MODE]
        if mode == Mode.CONFIDENCE or (mode == Mode.HYBRID and chain >= self.state[Word.MIN_CHAIN]):
            return 1 + chain
        return 1

    def _next_chunk(self) -> tuple[int, int]:
        """Bucket and steps of the next chunk; no steps: those under way may be enough."""
        width, chunks = self._choice.width, self._session.chunks[: self._chunks_run + 1]
        if self._most_pending > width:
            # There may be a chain from a wider bucket: one step that holds it, and all fits again.
            width, chunks = min(w for w in self._session.widths if w >= self._most_pending), (1,)
        left = int(self.state[Word.LIMIT] - self.state[Word.LENGTH])
        # Every step commits a token at the least; more than are likely to be needed would be idle.
        most = math.ceil(left / self._tokens_per_step()) - self._flight.steps
        if self._choice.most_steps is not None:
            # The first ones under way may be of another choice.
            most = min(most, self._choice.most_steps - min(self._flight.steps, self._steps_since))
        return width, max((steps for steps in chunks if steps <= most), default=0)

    def _tokens_per_step(self) -> float:
        """So far; 1 before the first step."""
        made = int(self.state[Word.TARGET_TOKENS : Word.UNVERIFIED_TOKENS + 1].sum())
        return max(1.0, made / max(1, int(self.state[Word.FORWARDS])))
