"""The decode step around the fake model, on numpy buffers: state words in, state words out.

The engine takes its three operations from a `StepOps`: the numpy twin here, compiled kernels
elsewhere. What it must do is in step_properties.py.
"""

from dataclasses import replace
from typing import Protocol

import numpy as np
from decode_oracle import Answer, Choice, Oracle, Request, greedy
from fake_model import FakeModel, views

from bitmtp_tvm.reference import step as step_twin
from bitmtp_tvm.reference.choose import choose as choose_twin
from bitmtp_tvm.reference.step import StepRows
from relax_models.state import (
    MOST_ROWS,
    NEVER,
    STATE_WORDS,
    Finish,
    Kind,
    Layout,
    Mode,
    Ring,
    Word,
)

FLOATS = (
    Word.THRESHOLD,
    Word.DRAFT_THRESHOLD,
    Word.TEMPERATURE,
    Word.TOP_P,
    Word.MIN_P,
    Word.PENALTY,
)


class StepOps(Protocol):
    """`state`, `ring` and `seen` change in place."""

    widths: tuple[int, ...]

    def step_rows(self, state: np.ndarray, width: int) -> StepRows: ...

    def choose(
        self, logits: np.ndarray, rows: StepRows, state: np.ndarray, seen: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """token, confidence and logprob of the rows."""

    def accept(
        self,
        state: np.ndarray,
        ring: np.ndarray,
        seen: np.ndarray,
        chosen: tuple[np.ndarray, np.ndarray, np.ndarray],
    ) -> None: ...


class TwinOps:
    """The numpy definition; it runs at every width."""

    widths = (1, 2, 3, 4, 6, 8, 11, 16, 24, 64)

    def step_rows(self, state, width):
        return step_twin.step_rows(state, width)

    def choose(self, logits, rows, state, seen):
        return choose_twin(logits, rows.logit_rows, rows.horizon, state, seen)

    def accept(self, state, ring, seen, chosen):
        step_twin.accept(state, ring, seen, *chosen)


class Engine:
    """`rows`, `logits`: of the last step that ran."""

    def __init__(self, ops: StepOps, model: FakeModel) -> None:
        self.ops, self.model = ops, model
        self.state, self.ring = step_twin.new_state()
        self.seen = np.full(model.vocab_size, NEVER, np.int32)
        self.rows: StepRows | None = None
        self.logits = np.zeros((0, model.vocab_size), np.float32)

    def write(self, state: np.ndarray, seen: np.ndarray | None = None) -> None:
        self.state = state.copy()
        if seen is not None:
            self.seen = seen.copy()

    def run(self, width: int, steps: int = 1) -> None:
        for _ in range(steps):
            self.rows = self.ops.step_rows(self.state, width)
            self.logits = self.model.forward(self.rows)
            chosen = self.ops.choose(self.logits, self.rows, self.state, self.seen)
            self.ops.accept(self.state, self.ring, self.seen, chosen)

    def read(self) -> tuple[np.ndarray, np.ndarray]:
        return self.state.copy(), self.ring.copy()


def set_floats(state: np.ndarray, **values: float) -> None:
    """Write floats to the words of these names, in lower case."""
    for name, value in values.items():
        assert Word[name.upper()] in FLOATS
        state[[Word[name.upper()]]] = np.array([value], np.float32).view(np.int32)


def first_state(request: Request, mask_token: int) -> np.ndarray:
    """The state of a request whose prompt, but for its last token, is materialised."""
    state = np.zeros(STATE_WORDS, np.int32)
    state[Word.LENGTH] = len(request.prompt)
    state[Word.BOUNDARY] = len(request.prompt) - 1
    state[Word.TAIL] = request.prompt[-1]
    state[Word.LIMIT], state[Word.MODE] = request.limit, Mode[request.mode.upper()]
    state[Word.MIN_CHAIN], state[Word.MASK_TOKEN] = request.min_chain, mask_token
    state[Word.BIDIRECTIONAL] = request.bidirectional
    state[Word.STOPS] = len(request.stops)
    state[Word.STOP_IDS :][: len(request.stops)] = sorted(request.stops)
    set_floats(
        state,
        threshold=request.threshold,
        draft_threshold=request.draft_threshold,
        penalty=request.penalty,
        top_p=1,
    )
    return state


def apply(choice: Choice, state: np.ndarray) -> None:
    state[Word.LAYOUT], state[Word.MASKS] = Layout[choice.layout.upper()], choice.masks
    state[Word.MOST_DRAFTS], state[Word.MOST_CHAIN] = choice.most_drafts, choice.most_chain


def first_places(tokens, vocab_size: int) -> np.ndarray:
    """`seen` of a sequence: `(V,)` int32."""
    seen = np.full(vocab_size, NEVER, np.int32)
    for place in reversed(range(len(tokens))):
        seen[tokens[place]] = place
    return seen


class Ride:
    """The engine and the oracle side by side over one model; `step` checks that they agree.

    Every step also holds the invariants of the state: n, b, the cache, the counters.
    """

    def __init__(self, ops: StepOps, model: FakeModel, request: Request) -> None:
        self.model, self.request = model, request
        self.oracle, self.engine = Oracle(request), Engine(ops, model)
        if len(request.prompt) > 1:
            model.prefill(request.prompt[:-1], 0)
        seen = first_places(request.prompt, model.vocab_size)
        self.engine.write(first_state(request, model.mask_token), seen)

    @property
    def new_tokens(self) -> list[int]:
        return self.oracle.tokens[len(self.request.prompt) :]

    def count(self, word: Word) -> int:
        return int(self.engine.state[word])

    def finish(self, *choices: Choice, most: int = 100) -> list[int]:
        """Step through the choices, again and again, to the end; the new tokens."""
        for step in range(most):
            if self.oracle.finish:
                return self.new_tokens
            self.step(choices[step % len(choices)])
        raise AssertionError(f"no end after {most} steps")

    def step(self, choice: Choice) -> None:
        apply(choice, self.engine.state)
        before = self.oracle.materialised
        rows = self.oracle.rows(choice)
        self.engine.run(choice.width)
        self._check_rows(rows, choice)
        answers = [
            _answer(logits, row, self.request.penalty)
            for row, logits in zip(rows, self.engine.logits, strict=False)
        ]
        self.oracle.take(rows, answers, choice)
        self.check()
        assert before <= self.oracle.materialised

    def rewind(self, length: int) -> None:
        """End the sequence at `length`, as the host does for a stop string."""
        self.oracle.rewind(length)
        state, _ = self.engine.read()
        state[Word.LENGTH], state[Word.BOUNDARY] = length, self.oracle.materialised
        state[Word.DRAFTS], state[Word.FINISH] = 0, Finish.RUNNING
        state[Word.TAIL :][: len(self.oracle.pending)] = self.oracle.pending
        self.engine.write(state, first_places(self.oracle.tokens, self.model.vocab_size))

    def _check_rows(self, rows, choice: Choice) -> None:
        made, width = self.engine.rows, choice.width
        assert made.boundary.tolist() == [self.oracle.materialised]
        padding = [[row] for row in range(len(rows), width)]
        assert views(made.visible) == [*(sorted(row.sees) for row in rows), *padding]
        mask = self.model.mask_token
        tokens = [mask if row.kind == "mask" else row.token for row in rows]
        assert made.tokens.tolist()[: len(rows)] == tokens
        assert made.position.tolist()[: len(rows)] == [row.position for row in rows]
        assert made.horizon.tolist()[: len(rows)] == [len(row.known) for row in rows]
        asking = [place if row.asks else -1 for place, row in enumerate(rows)]
        assert made.logit_rows.tolist() == asking + [-1] * len(padding)
        assert (0 <= made.position).all() and (made.position < self.request.limit).all()

    def check(self) -> None:
        """All that the state says is what the oracle says."""
        oracle, (state, ring) = self.oracle, self.engine.read()
        length, boundary = len(oracle.tokens), oracle.materialised
        assert (state[Word.LENGTH], state[Word.BOUNDARY]) == (length, boundary)
        assert 0 <= boundary < length <= self.request.limit
        assert self.model.holds(oracle.tokens[:boundary])
        assert Finish(state[Word.FINISH]).name.lower() == (oracle.finish or "running")
        assert state[Word.DRAFTS] == len(oracle.drafts)
        tail = oracle.pending + oracle.drafts
        assert state[Word.TAIL :][: len(tail)].tolist() == tail
        self._check_ring(ring)
        self._check_counts(state)
        if self.request.penalty != 1:
            tokens = oracle.tokens + oracle.drafts
            assert (self.engine.seen == first_places(tokens, self.model.vocab_size)).all()

    def _check_ring(self, ring: np.ndarray) -> None:
        places = np.arange(len(self.request.prompt), len(self.oracle.tokens)) % ring.shape[1]
        committed = self.oracle.committed
        assert ring[Ring.TOKEN, places].tolist() == [token.token for token in committed]
        kinds = [Kind(kind).name.lower() for kind in ring[Ring.KIND, places]]
        assert kinds == [token.kind for token in committed]
        logprob = ring[Ring.LOGPROB, places].view(np.float32)
        wanted = [token.logprob for token in committed]
        np.testing.assert_allclose(logprob, wanted, rtol=1e-4, atol=1e-6)

    def _check_counts(self, state: np.ndarray) -> None:
        counts = self.oracle.counts
        for name in "forwards", "idle":
            assert state[Word[name.upper()]] == counts[name]
        for name in "target", "draft", "unverified":
            assert state[Word[f"{name.upper()}_TOKENS"]] == counts[name]
        for name in "evaluated", "accepted", "offered", "proposed", "chained":
            words = state[Word[name.upper()] :][:MOST_ROWS]
            assert words[:9].tolist() == [counts[name, j] for j in range(9)]
            assert not words[9:].any()


def plain(ops: StepOps, model: FakeModel, request: Request) -> list[int]:
    """What the request gives one token at a time."""
    alone = Ride(ops, model, replace(request, mode="ar"))
    return alone.finish(Choice(width=min(ops.widths), masks=0, most_drafts=0))


def _answer(logits, row, penalty):
    return greedy(logits, row.known, penalty) if row.asks else Answer(-1, 0.0, 0.0)
