"""Build one operation for the processor, as written or as scheduled, and run it on numpy arrays."""

from collections.abc import Sequence

import numpy as np
import tvm
from tvm import tirx

from bitmtp_tvm.specialize import bind_dims
from bitmtp_tvm.targets import get_target, tvm_target
from schedules import rule

CPU = tvm_target(get_target("cpu"))


def build(func: tirx.PrimFunc, target: tvm.target.Target = CPU):
    return tirx.build(
        tvm.IRModule({"main": func.with_attr("global_symbol", "main")}), target=target
    )


def scheduled(func: tirx.PrimFunc, **dims: int) -> tirx.PrimFunc:
    made = rule.apply(bind_dims(func, dims), CPU)
    assert made is not None
    return made


def run(func: tirx.PrimFunc, arguments: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Call a built PrimFunc on copies of `arguments`; returns all of them afterwards."""
    tensors = [tvm.runtime.tensor(np.ascontiguousarray(array).copy()) for array in arguments]
    build(func)["main"](*tensors)
    return [tensor.numpy() for tensor in tensors]
