"""The compiled kernels of a decode step as `step_engine.StepOps`."""

from collections.abc import Callable, Sequence

import numpy as np

from bitmtp_tvm.reference.step import StepRows

WIDTHS = (1, 3, 8, 16, 64)

# From an operation, a width and numpy arrays to all of the arrays after the call.
Call = Callable[[str, int, Sequence[np.ndarray]], list[np.ndarray]]


class KernelOps:
    """`parts`: of a row of logits, as `softmax_parts` sums it up. Results start out as rubbish."""

    widths = WIDTHS

    def __init__(self, call: Call, parts: int) -> None:
        self._call, self._parts = call, parts

    def step_rows(self, state: np.ndarray, width: int) -> StepRows:
        shapes = (width,), (width,), (1,), (width, 2), (width,), (width,)
        made = [np.full(shape, 77, np.int32) for shape in shapes]
        made[3] = made[3].astype(np.uint32)
        state[:], *rows = self._call("step_rows", width, [state, *made])
        return StepRows(*rows)

    def choose(self, logits, rows, state, seen):
        width = len(logits)
        asked = [logits, rows.logit_rows, rows.horizon, state, seen]
        made = _rubbish((width, self._parts), np.float32, np.int32, np.float32)
        made = self._call("softmax_parts", width, asked + made)[len(asked) :]
        chosen = _rubbish((width,), np.int32, np.float32, np.float32)
        token, confidence, logprob = self._call("choose", width, asked + made + chosen)[-3:]
        return token, confidence, logprob

    def accept(self, state, ring, seen, chosen):
        after = self._call("accept", len(chosen[0]), [*chosen, state, ring, seen])
        state[:], ring[:], seen[:] = after[-3:]


def _rubbish(shape: tuple[int, ...], *dtypes: type) -> list[np.ndarray]:
    return [np.full(shape, 77, dtype) for dtype in dtypes]
