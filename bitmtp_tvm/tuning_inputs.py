"""Arguments that kernels are tuned with, as a model would give them, and what must come out."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from bitmtp_tvm.errors import BitMTPError
from bitmtp_tvm.reference.ops import group_linear, low_bit_linear, quantize, quantize_groups
from relax_models.formats import K_BLOCK, get_format, pack, pack_scales

if TYPE_CHECKING:
    from bitmtp_tvm.tuning_plan import Task

# Of the largest result: exact sums differ by their last rounding, sums of floats by their order.
TOLERANCE = {False: 1e-6, True: 1e-5}


@dataclass(frozen=True)
class Inputs:
    """arguments: all of a kernel's, the result last and NaN; expected: what the numpy twin makes of
    them; tolerance: how far a kernel may be from it, absolutely."""

    arguments: tuple[np.ndarray, ...]
    expected: np.ndarray
    tolerance: float


@dataclass(frozen=True)
class Operation:
    """What tuning knows of an operation: `constants` are the arguments that are weights."""

    constants: tuple[int, ...]
    make: Callable[["Task", str], Inputs]


def make_inputs(task: "Task", kind: str) -> Inputs:
    """Random arguments of a task's kernels, the same at every call; `kind` is the target's."""
    return operation(task.key.op).make(task, kind)


def operation(op: str) -> Operation:
    """What is known of an operation; `BitMTPError` where nothing is."""
    if op not in OPERATIONS:
        raise BitMTPError(
            f"{op} has kernel templates but no inputs to tune them with: add it to OPERATIONS in "
            "bitmtp_tvm/tuning_inputs.py"
        )
    return OPERATIONS[op]


@lru_cache(maxsize=8)
def _weights(
    rows: int, parts: int, size: int, format_name: str, kind: str
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Codes and scales of a matrix, plain and as kernels take them."""
    form = get_format(format_name)
    rng = np.random.default_rng([rows, size])
    codes = rng.integers(0, 3 if form.bits == 2 else 2, (rows, size), np.uint8)
    packed = pack(codes, kind, form.bits)
    if form.group is None:
        scales = rng.uniform(0.5, 2, parts).astype(np.float32)
        return codes, scales, packed, scales
    scales = rng.uniform(0.01, 0.03, (rows, -(-size // K_BLOCK))).astype(np.float16)
    return codes, scales, packed, pack_scales(scales, kind, form.bits)


def _low_bit_linear(task: "Task", kind: str) -> Inputs:
    """See `relax_models.ops.low_bit_linear`; every matrix of a fused one has its own scale."""
    form = get_format(task.key.format)
    segments, size = list(task.settings["segments"]), int(task.settings["size"])
    codes, scales, *weights = _weights(sum(segments), len(segments), size, form.name, kind)
    rng = np.random.default_rng([size, 1])
    x = rng.normal(size=(task.key.width, size)).astype(np.float32)
    if form.group:
        q, scale, total = quantize_groups(x)
        expected = group_linear(q, scale, total, codes, scales, form.bits)
    else:
        q, scale, total = quantize(x)
        expected = low_bit_linear(q, scale, total, codes, scales, segments)
    added = []
    if task.key.residual:
        added = [rng.normal(size=expected.shape).astype(np.float32)]
        expected = expected + added[0]
    result = np.full(expected.shape, np.nan, np.float32)
    tolerance = TOLERANCE[form.group is not None] * float(np.abs(expected).max())
    return Inputs((q, scale, total, *weights, *added, result), expected, tolerance)


OPERATIONS = {"low_bit_linear": Operation((3, 4), _low_bit_linear)}


def is_right(inputs: Inputs, got: np.ndarray) -> bool:
    """Whether a kernel's result is that of the twin."""
    return got.shape == inputs.expected.shape and bool(
        (np.abs(got - inputs.expected) <= inputs.tolerance).all()
    )
