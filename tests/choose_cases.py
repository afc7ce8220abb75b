"""Requests for the kernels that choose tokens, and what may come out of them."""

from dataclasses import dataclass, replace

import numpy as np

from bitmtp_tvm import reference
from bitmtp_tvm.reference.choose import penalised, scores, setting
from bitmtp_tvm.sampling import SamplingOptions
from relax_models.state import NEVER, STATE_WORDS, Word

# float32 may tell the best two candidates apart differently, and the mass at the edge of a filter.
CLOSE = 1e-4
POSITIONS = 1000

OPTIONS = {
    "greedy": SamplingOptions(),
    "penalty": SamplingOptions(repetition_penalty=1.3),
    "reward": SamplingOptions(repetition_penalty=0.8),
    "temperature": SamplingOptions(1.0),
    "hot": SamplingOptions(50.0),
    "cold": SamplingOptions(0.01, top_k=7),
    "top_k": SamplingOptions(0.7, top_k=20),
    "top_1": SamplingOptions(1.0, top_k=1),
    "top_k of nearly all": SamplingOptions(2.0, top_k=590),
    "top_p": SamplingOptions(1.3, top_p=0.9),
    "tiny top_p": SamplingOptions(1.3, top_p=1e-6),
    "top_p of nearly all": SamplingOptions(1.0, top_p=0.9999),
    "min_p": SamplingOptions(1.0, min_p=0.05),
    "everything": SamplingOptions(0.9, 30, 0.8, 0.02, 1.2),
}


@dataclass
class Case:
    """The arguments of `choose`: see `bitmtp_tvm.reference.choose`."""

    logits: np.ndarray
    logit_rows: np.ndarray
    horizon: np.ndarray
    state: np.ndarray
    seen: np.ndarray

    @property
    def arguments(self) -> list[np.ndarray]:
        return [self.logits, self.logit_rows, self.horizon, self.state, self.seen]

    def rows(self, picked: slice) -> "Case":
        """Some rows alone; `state` still has to say that they are target rows."""
        return replace(
            self,
            logits=self.logits[picked],
            logit_rows=self.logit_rows[picked],
            horizon=self.horizon[picked],
        )


def state_for(options: SamplingOptions, targets: int, seed: int = 7) -> np.ndarray:
    """A state whose first `targets` rows may sample: one pending, the others drafts."""
    state = np.zeros(STATE_WORDS, np.int32)
    words = replace(options, seed=seed).words()
    for word, value in {**words, Word.ROW_PENDING: 1, Word.ROW_DRAFTS: targets - 1}.items():
        state[word] = value
    return state


def random_case(
    rng: np.random.Generator, rows: int, vocab_size: int, options: SamplingOptions, targets: int
) -> Case:
    """Logits as a model has them: a wide bulk and a few high ones; half of the tokens seen."""
    logits = rng.normal(size=(rows, vocab_size)) * 2
    for row in range(rows):
        logits[row, rng.integers(0, vocab_size, 8)] += rng.uniform(0, 9, 8)
    seen = rng.integers(0, POSITIONS, vocab_size)
    return Case(
        logits.astype(np.float32),
        np.arange(rows, dtype=np.int32),
        rng.integers(0, POSITIONS, rows).astype(np.int32),
        state_for(options, targets, int(rng.integers(0, 2**63))),
        np.where(rng.random(vocab_size) < 0.5, seen, NEVER).astype(np.int32),
    )


def damaged(rng: np.random.Generator, case: Case) -> Case:
    """Many ties and many -inf; the first rows have nothing finite, a NaN, a +inf, ask nothing."""
    logits = np.round(case.logits)
    logits[rng.random(logits.shape) < 0.6] = -np.inf
    logits[0] = -np.inf
    logits[1, -1] = np.nan
    logits[2, 0] = np.inf
    logits[3] = np.nan
    asked = case.logit_rows.copy()
    asked[3] = -1
    return replace(case, logits=logits, logit_rows=asked)


def check(case: Case, token: np.ndarray, confidence: np.ndarray, logprob: np.ndarray) -> int:
    """Compare with the twin; returns the rows whose token differs, all of them close calls."""
    want, sure, likely = reference.choose(*case.arguments)
    np.testing.assert_allclose(confidence, sure, rtol=1e-5, atol=1e-7)
    same = token == want
    np.testing.assert_allclose(logprob[same], likely[same], rtol=1e-5, atol=1e-5)
    for row in np.flatnonzero(~same):
        assert token[row] in close_calls(case, row)
    return int((~same).sum())


def close_calls(case: Case, row: int) -> set[int]:
    """Tokens that win by the twin within `CLOSE`, with filters a little wider or narrower."""
    z = penalised(case.logits[row], case.horizon[row], case.state, case.seen)
    if not setting(case.state, Word.TEMPERATURE):
        return set()
    found: set[int] = set()
    for change in (1, 1 - CLOSE, 1 + CLOSE):
        state = case.state.copy()
        floats = state.view(np.float32)
        floats[Word.TOP_P] = min(1, floats[Word.TOP_P] * change)
        floats[Word.MIN_P] *= change
        score = scores(z, int(case.horizon[row]), state)
        found |= set(np.flatnonzero(score >= score.max() - CLOSE).tolist())
    return found
