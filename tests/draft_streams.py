"""Made-up sequences with drafts of a given quality, stepped through the twin of the decode step.

The time is that of a table t(W): what a choice of rows is worth can be computed, not measured.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from bitmtp_tvm.modes import DecodeOptions, resolve
from bitmtp_tvm.policy import Policy, StepChoice
from bitmtp_tvm.reference.step import accept, new_state, step_rows
from relax_models.state import Finish, Mode, Word

MTP = {"block_size": 8, "mask_token_id": 2, "label": "next", "block_attention": "causal"}
PROMPT = 4
WRONG = 5

# Milliseconds by width. `launches`: an H200 before any tuning, bound by launches; `flat`: the aim;
# `demo`: the demo on an H200.
TABLES = {
    "launches": {1: 1.66, 2: 1.68, 4: 1.79, 8: 2.11, 16: 3.11},
    "flat": {1: 0.5, 2: 0.51, 4: 0.52, 8: 0.53, 16: 0.62, 24: 0.7, 32: 0.8, 48: 1.0, 64: 1.15},
    "demo": {1: 0.148, 2: 0.176, 4: 0.184, 8: 0.192, 16: 0.208, 32: 0.239, 64: 0.294},
    "stairs": {1: 1.0, 2: 1.02, 4: 1.05, 8: 1.1, 16: 2.4, 32: 4.8},
    "sloped": {1: 1.0, 2: 1.3, 4: 1.9, 8: 3.0, 16: 5.5},
    "linear": {1: 1.0, 2: 1.9, 4: 3.7, 8: 7.2, 16: 14.0},
}


@dataclass
class Stream:
    """Blocks whose confidences fall from `first` by `on`; a mask is right with chance `right(c)`.

    Equal for every way to decode: what stands at a length is drawn from the length alone.
    """

    first: float
    on: float
    right: Callable[[float], float]
    blocks: dict[int, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)

    def block(self, length: int) -> tuple[np.ndarray, np.ndarray]:
        """Confidence and rightness of the mask rows behind `length` tokens, each `(8,)`."""
        if length not in self.blocks:
            draws = np.random.default_rng((7, length)).random((2, 8))
            factors = np.array([self.first] + [self.on] * 7)
            confidence = np.cumprod(factors ** (2 * draws[0]))
            right = draws[1] < [self.right(c) for c in confidence.tolist()]
            self.blocks[length] = confidence, np.logical_and.accumulate(right)
        return self.blocks[length]


STREAMS = {
    "easy": Stream(0.97, 0.97, lambda c: c**0.5),
    "calibrated": Stream(0.6, 0.8, lambda c: c),
    "overconfident": Stream(0.9, 0.95, lambda c: 0.5 * c),
    "unsure": Stream(0.2, 0.5, lambda c: c),
    "hopeless": Stream(0.97, 0.97, lambda c: 0.02),
}


@dataclass
class Run:
    tokens: int
    milliseconds: float
    choices: list[StepChoice]

    @property
    def rate(self) -> float:
        return self.tokens / self.milliseconds


def options(mode: str, table: Mapping[int, float], **wanted: object) -> DecodeOptions:
    return resolve(MTP, tuple(table), mode=mode, **wanted)


def decode(
    wanted: DecodeOptions,
    table: Mapping[int, float],
    stream: Stream,
    tokens: int,
    source: Policy | StepChoice,
    switch: float = 0.2,
    ahead: bool = False,
) -> Run:
    """Decode so many tokens in chunks of up to 4 steps.

    `switch`: plain steps that a change of the choice costs: a wider step, or the wait behind a
    trial. `ahead`: as on a GPU, where the next chunk is under way when one is read.
    """
    state, ring = begun(wanted, tokens)
    following = source if isinstance(source, Policy) else None
    choice = following.choice() if following else source
    run = Run(tokens, 0.0, [])

    def chunk() -> None:
        for _ in range(min(4, choice.most_steps or 4)):
            if state[Word.FINISH] == Finish.RUNNING:
                run.milliseconds += table[choice.width]
                step(state, ring, choice.width, stream)
        run.choices.append(choice)

    while state[Word.FINISH] == Finish.RUNNING:
        for word, value in choice.words.items():
            state[word] = value
        chunk()
        if following:
            before, after = choice, following.update(state)
            if ahead and after.words != before.words and before.most_steps is None:
                chunk()
                after = following.update(state)
            choice = after
            run.milliseconds += switch * min(table.values()) * (after.words != before.words)
    return run


def begun(wanted: DecodeOptions, tokens: int) -> tuple[np.ndarray, np.ndarray]:
    state, ring = new_state()
    state[Word.LENGTH], state[Word.BOUNDARY] = PROMPT, PROMPT - 1
    state[Word.LIMIT] = PROMPT + tokens
    state[Word.TAIL] = token_at(PROMPT - 1)
    state[Word.MODE], state[Word.MIN_CHAIN] = Mode[wanted.mode.upper()], wanted.min_chain
    state[Word.BIDIRECTIONAL] = wanted.bidirectional
    floats = state.view(np.float32)
    floats[Word.THRESHOLD] = wanted.threshold
    floats[Word.DRAFT_THRESHOLD] = wanted.draft_threshold
    floats[Word.PENALTY] = 1
    return state, ring


def token_at(position: int) -> int:
    return 10 + position % 97


def step(state: np.ndarray, ring: np.ndarray, width: int, stream: Stream) -> None:
    rows = step_rows(state, width)
    pending, drafts, masks, blocks = (int(n) for n in state[Word.ROW_PENDING :][:4])
    token, confidence = np.full(width, -1, np.int32), np.ones(width, np.float32)
    for row in range(pending - 1, pending + drafts):
        token[row] = token_at(int(rows.horizon[row]))
    for block in range(blocks):
        first = pending + drafts + block * masks
        length = int(rows.horizon[first])
        sure, right = stream.block(length)
        truth = [token_at(length + 1 + j) for j in range(masks)]
        token[first : first + masks] = np.where(right[:masks], truth, WRONG)
        confidence[first : first + masks] = sure[:masks]
    accept(state, ring, np.zeros(128, np.int32), token, confidence, np.zeros(width, np.float32))
