"""Measuring t(W): steps whose every row is in use, back to back, at a given fill of the context."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from bitmtp_tvm.cli import check_stopped
from bitmtp_tvm.errors import BitMTPError, UsageError
from bitmtp_tvm.flight import TokenSession
from bitmtp_tvm.manifest import Manifest
from bitmtp_tvm.step_times import TYPICAL_FILL, Timing
from relax_models.state import STATE_WORDS, Finish, Layout, Mode, Word

ROUNDS = 5
SECONDS = 0.4
"""A round ends after so long, or so many chunks."""

CHUNKS = 40
LEAST_CHUNKS = 3


@dataclass(frozen=True)
class Bench:
    """What is measured: `fill` tokens of context stand before the first step of a round.

    `clock` gives seconds; `mask_token_id` is what unverified rows hold.
    """

    fill: int
    mask_token_id: int = 0
    clock: Callable[[], float] = time.perf_counter


def check_fill(room: TokenSession | Manifest, fill: int | None) -> int:
    """`fill`, if the context has room behind it for a round in every bucket.

    None: as much as is usual, or half of a shorter context, or what there is room for. Raises
    `UsageError`.
    """
    most = room.context - room.widths[-1] - LEAST_CHUNKS * room.chunks[-1] - 1
    if most < 1:
        raise UsageError(
            f"a context of {room.context} tokens is too short to measure steps of "
            f"{room.widths[-1]} rows in: compile with a larger --context"
        )
    if fill is None:
        return min(TYPICAL_FILL, room.context // 2, most)
    if not 1 <= fill <= most:
        raise UsageError(
            f"steps cannot be measured with {fill} tokens of context: give --fill 1 to {most}"
        )
    return fill


def measure_steps(session: TokenSession, bench: Bench) -> dict[int, Timing]:
    """Milliseconds of a step in every bucket of the session.

    Raises `BitMTPError` when a step does not do what is measured.
    """
    prompt = [1 + i % 7 for i in range(bench.fill - 1)]
    if prompt:
        session.prefill(prompt, 0)
    return {width: measure_width(session, width, bench) for width in session.widths}


def measure_width(session: TokenSession, width: int, bench: Bench) -> Timing:
    """Milliseconds of a step of `width` rows, whose K/V storage is filled already."""
    samples = [sample for _ in range(ROUNDS) for sample in _round(session, width, bench)]
    return Timing.of([1000 * sample for sample in samples])


def _round(session: TokenSession, width: int, bench: Bench) -> Iterator[float]:
    """Seconds a step, from one read-back to the next, while the device always has work waiting."""
    steps = session.chunks[-1]
    session.write(full_state(width, bench.fill, session.context, bench.mask_token_id))
    room = (session.context - bench.fill - width - 1) // steps
    left = min(CHUNKS, room)
    # The first chunk may capture a graph, and finds the device idle.
    for _ in range(min(session.depth, left)):
        session.run(width, steps)
        left -= 1
    waiting, ran, start = session.depth, 0, bench.clock()
    before: float | None = None
    state = np.zeros(0, np.int32)
    while waiting:
        check_stopped()
        state, _ = session.read()
        now = bench.clock()
        waiting, ran = waiting - 1, ran + steps
        if before is not None:
            yield (now - before) / steps
        if session.depth == 1:
            # Nothing works while the host looks: what it does now is not the step's.
            now = bench.clock()
        before = now
        if left and now - start < SECONDS:
            session.run(width, steps)
            waiting, left = waiting + 1, left - 1
    _check(state, width, ran)


def full_state(width: int, length: int, limit: int, mask_token_id: int) -> np.ndarray:
    """State words `(STATE_WORDS,)` int32 with which each step runs `width` rows and commits one.

    One pending row, and mask rows that are valid and never sure enough to become drafts.
    """
    state = np.zeros(STATE_WORDS, np.int32)
    state[Word.LENGTH], state[Word.BOUNDARY], state[Word.LIMIT] = length, length - 1, limit
    state[Word.MODE], state[Word.LAYOUT] = Mode.SPECULATIVE, Layout.CHAIN
    state[Word.MASKS], state[Word.MASK_TOKEN] = width - 1, mask_token_id
    floats = state.view(np.float32)
    floats[Word.THRESHOLD] = floats[Word.DRAFT_THRESHOLD] = 2
    floats[Word.TOP_P] = floats[Word.PENALTY] = 1
    return state


def _check(state: np.ndarray, width: int, steps: int) -> None:
    if state[Word.FINISH] == Finish.BROKEN:
        raise BitMTPError(
            "the model gave no finite logit while steps were measured: its weights are damaged or "
            "do not belong to this program, compile the artifact again"
        )
    rows = int(state[Word.ROW_PENDING] + state[Word.ROW_MASKS] * state[Word.ROW_BLOCKS])
    if state[Word.FORWARDS] != steps or rows != width:
        raise BitMTPError(
            f"a step of {width} rows ran {rows}, and {int(state[Word.FORWARDS])} of {steps} steps "
            "did something: compile the artifact again"
        )
