"""What tuning runs a kernel with, and that the results it expects are those of the operation."""

import cpu_kernels
import numpy as np
import pytest

from bitmtp_tvm.cards import card_of
from bitmtp_tvm.records import Key
from bitmtp_tvm.specialize import bind_dims
from bitmtp_tvm.targets import get_target
from bitmtp_tvm.tuning_bench import weights_name
from bitmtp_tvm.tuning_inputs import is_right, make_inputs, operation
from bitmtp_tvm.tuning_plan import Task
from relax_models import fused_attention_ops
from schedules.workload import read

# Query heads, key/value heads, their size, positions and slots.
SIZES = (4, 2, 16, 600, 700)


def task_of(width):
    func = bind_dims(fused_attention_ops.rope_attention_parts(*SIZES), {"width": width})
    work = read(func)
    key = Key.of(work, card_of(get_target("h200")))
    return func, Task(work.op, key, work.settings, work.shapes, work.dtypes, (), 0, {})


@pytest.mark.parametrize("width", [1, 3])
def test_attention_that_writes_its_cache_gives_the_same_again(width):
    """A candidate is launched many times over one cache."""
    func, task = task_of(width)
    inputs = make_inputs(task, "cuda")
    once = cpu_kernels.run(func, list(inputs.arguments))
    twice = cpu_kernels.run(func, once)
    (place,) = operation(task.key.op).constants
    assert inputs.arguments[place].shape == (2, 2, 700, 16)
    assert not np.array_equal(once[place], inputs.arguments[place])
    assert is_right(inputs, once[-3:]) and is_right(inputs, twice[-3:])
    once[-1][:, :, 0] *= np.float32(1.1)
    assert not is_right(inputs, once[-3:])


def test_kernels_of_all_widths_share_a_cache():
    """The bench keeps one on the device for all of them: others wrote into it before."""
    func, narrow = task_of(1)
    wide_func, wide = task_of(3)
    assert weights_name(narrow) == weights_name(wide)
    (place,) = operation(narrow.key.op).constants
    shared = cpu_kernels.run(wide_func, list(make_inputs(wide, "cuda").arguments))[place]
    inputs = make_inputs(narrow, "cuda")
    arguments = list(inputs.arguments)
    arguments[place] = shared
    assert is_right(inputs, cpu_kernels.run(func, arguments)[-3:])
