"""What is left of a step on the processor besides its kernels."""

from collections import Counter

import numpy as np
import tvm
from test_bitmtp_tvm_specialize import model
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T

from bitmtp_tvm import lean, pipeline
from bitmtp_tvm.chunks import bindings_of
from bitmtp_tvm.specialize import buckets
from bitmtp_tvm.targets import get_target, tvm_target

CPU = tvm_target(get_target("cpu"))


@I.ir_module
class Doubled:
    """Three views of one block, two of them alike; x doubled twice."""

    @T.prim_func(private=True, s_tir=True)
    def double(x: T.Buffer((4,), "float32"), y: T.Buffer((4,), "float32")):
        for i in range(4):
            with T.sblock("y"):
                v = T.axis.spatial(4, i)
                y[v] = x[v] + x[v]

    @R.function
    def main(x: R.Tensor((4,), "float32"), out: R.Tensor((4,), "float32")):
        R.func_attr({"relax.force_pure": True})
        cls = Doubled
        block = R.memory.alloc_storage(R.shape([16]), 0, "global", "float32")
        first = R.memory.alloc_tensor(block, 0, R.shape([4]), "float32")
        other = R.memory.alloc_tensor(block, 0, R.shape([2]), "float32")
        cls.double(x, first)
        _pair = (first, other)
        again = R.memory.alloc_tensor(block, 0, R.shape([4]), "float32")
        cls.double(again, out)
        return out


def builtins(func):
    """How often each operation of the virtual machine stands in a function."""
    found = Counter()

    def visit(node):
        if isinstance(node, relax.Call):
            name = getattr(node.op, "name", "") or getattr(node.op, "global_symbol", "")
            found[name] += 1
        elif isinstance(node, relax.Tuple):
            found["tuple"] += 1

    for binding in bindings_of(func):
        visit(binding.value)
    return found


def test_views_that_are_alike_are_one():
    before, after = builtins(Doubled["main"]), lean.share_views(Doubled)
    assert before[lean.ALLOC_TENSOR] == 3 and before["tuple"] == 1
    found = builtins(after["main"])
    assert found[lean.ALLOC_TENSOR] == 2 and not found["tuple"]
    assert found["relax.memory.alloc_storage"] == 1
    # No alias is left, which would be a copy.
    assert not [b for b in bindings_of(after["main"]) if isinstance(b.value, relax.Var)]
    built = tvm.compile(relax.transform.LowerRuntimeBuiltin()(after), CPU)
    machine = relax.VirtualMachine(built, tvm.cpu())
    x = np.arange(4, dtype=np.float32)
    out = machine["main"](tvm.runtime.tensor(x), tvm.runtime.tensor(np.zeros(4, np.float32)))
    np.testing.assert_array_equal(out.numpy(), 4 * x)


def test_a_step_on_the_processor_checks_and_forgets_nothing():
    mod = pipeline.lower(model()[0], buckets((2,), (4,)), CPU).mod
    for name in ("decode_w2", "prefill_w4"):
        found = builtins(mod[name])
        assert not found.keys() & lean.CHECKS
        assert not [builtin for builtin in found if "kill" in builtin]
        views = [str(b.value) for b in bindings_of(mod[name]) if "alloc_tensor" in str(b.value)]
        assert views and len(set(views)) == len(views)


def test_on_a_gpu_the_host_checks_as_before():
    target = tvm_target(get_target("h200"))
    names = [name for name, _ in pipeline._passes(None, (), target, None)]
    assert "kill_after_last_use" in names and not {"share_views", "drop_checks"} & set(names)
