"""The kernels of the decode step, compiled for the processor, against the oracle."""

import copy
from dataclasses import fields
from itertools import product

import numpy as np
import pytest
import tvm
from cpu_kernels import CPU, scheduled
from fake_model import VOCAB
from hypothesis import given
from numpy.testing import assert_array_equal
from step_cases import at_widths, cases
from step_engine import Ride, TwinOps, apply
from step_kernels import WIDTHS, KernelOps
from step_properties import StepProperties, bounded
from step_stops import StopProperties

from bitmtp_tvm.reference.step import StepRows
from relax_models import choose_ops, step_ops
from relax_models.state import Ring


@pytest.fixture(scope="module")
def ops():
    """All kernels at all widths, in one library."""
    funcs = {
        "step_rows": (step_ops.step_rows(), "width"),
        "softmax_parts": (choose_ops.softmax_parts(VOCAB), "rows"),
        "choose": (choose_ops.choose(VOCAB), "rows"),
        "accept": (step_ops.accept(VOCAB), "rows"),
    }
    made = {}
    for (name, (func, dim)), width in product(funcs.items(), WIDTHS):
        symbol = f"{name}_{width}"
        made[symbol] = scheduled(func, **{dim: width}).with_attr("global_symbol", symbol)
    library = tvm.tirx.build(tvm.IRModule(made), target=CPU)
    # Looking a function up costs more than calling it.
    kernels = {symbol: library[symbol] for symbol in made}

    def call(name, width, arrays):
        copies = [aligned(array) for array in arrays]
        kernels[f"{name}_{width}"](*copies)
        return copies

    return KernelOps(call, choose_ops.parts_of(VOCAB))


def aligned(array):
    """A copy that starts where TVM's own tensors do: kernels may count on it."""
    room = np.empty(array.nbytes + 64, np.uint8)
    start = -room.ctypes.data % 64
    copy = room[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


class TestKernels(StepProperties, StopProperties):
    pass


@bounded
@given(case=cases())
def test_the_kernels_leave_the_very_words_that_the_twin_leaves(ops, case):
    """All words, padding and what is stale included."""
    model, request, steps = case
    engines = [Ride(made, copy.deepcopy(model), request).engine for made in (ops, TwinOps())]
    for choice in at_widths(steps, ops) * 3:
        for engine in engines:
            apply(choice, engine.state)
            engine.run(choice.width)
        one, other = engines
        for field in fields(StepRows):
            assert_array_equal(getattr(one.rows, field.name), getattr(other.rows, field.name))
        assert_array_equal(one.state, other.state)
        assert_array_equal(one.seen, other.seen)
        for row in Ring.TOKEN, Ring.KIND:
            assert_array_equal(one.ring[row], other.ring[row])
