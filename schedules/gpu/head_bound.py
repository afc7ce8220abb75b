"""Words of the bounded head's kernels on cuda: its bound and scores (relax_models.head_ops).

Spelled out to the rounding, so that a token is a candidate in every bucket or in none.
"""

from dataclasses import dataclass
from typing import Any

from tvm.script import tirx as T

from schedules.gpu.thread import constant, fma, mul
from schedules.sampling import penalty_factor, setting, words_of
from schedules.workload import Workload

SCALE, ERROR, LENGTH = range(3)
"""Rows of the bounds."""

_INFINITY = 0x7F800000


def bound(error, length, spread, row, least: float):
    """The most that a token's exact logit can differ from its 8-bit one: ERROR and LENGTH of the
    token, and the activation row's spread."""
    return fma(error, spread[row, 1], fma(length, spread[row, 2], constant(least)))


def is_finite(value):
    """Asked of the bits."""
    magnitude = T.bitwise_and(T.reinterpret("int32", value), T.int32(0x7FFFFFFF))
    return magnitude < T.int32(_INFINITY)


@dataclass(frozen=True, eq=False)
class Penalty:
    """Buffers that the repetition penalty needs; see `relax_models.choose_ops.softmax_parts`."""

    horizon: Any
    state: Any
    seen: Any


def penalizer(work: Workload):
    """A macro that puts the repetition penalty of a row on values[i] of the token n; one that
    leaves it where the operation knows of none (and is given None for the buffers)."""

    @T.macro
    def leave(values, i, n, row, given):
        pass

    if not work.settings["with_penalty"]:
        return leave
    words = words_of(work)

    @T.macro
    def penalise(values, i, n, row, given):
        if setting(given.state, words.penalty) != T.float32(1):
            if given.seen[n] < given.horizon[row]:
                values[i] = mul(values[i], penalty_factor(values[i], given.state, words))

    return penalise
