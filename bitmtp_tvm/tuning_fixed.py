"""Arguments of a step's kernels that nothing is searched for: they keep their places in the chain.

Their results are compared with nothing here, so what counts is what their time depends on: which
rows are in use, how far back a sequence goes, how many tokens are candidates.
"""

from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from bitmtp_tvm.errors import BitMTPError
from bitmtp_tvm.step_timing import full_state
from bitmtp_tvm.tuning_inputs import FILL, Inputs, cache_of
from relax_models.state import NEVER, Word

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bitmtp_tvm.tuning_plan import Task

# By operation: the arguments that another layer has anew, or that no cache holds.
FIXED: dict[str, tuple[str, ...]] = {
    "accept": (),
    "attention_join": (),
    "attention_join_quantize": (),
    "choose": (),
    "embed": ("table",),
    "final_norm": ("weight",),
    "final_norm_codes": ("weight",),
    "gated_norm_quantize": ("weight",),
    "gated_quantize": (),
    "head": ("table",),
    "head_rescore": ("table",),
    "low_bit_embed": ("weight", "weight_scale"),
    "norm_quantize": ("weight",),
    "norm_rope_kv_write": ("cache",),
    "qk_norm": (),
    "quantize": (),
    "rope_kv_write": ("cache",),
    "softmax_parts": (),
    "step_rows": (),
}

LIMIT = 1 << 30
"""Tokens of the sequence: no replay of a chain ends it."""

# Of a row's logits so many are candidates: scores above the floor, which stay there when they are
# computed again, since the rows of the table and of what is multiplied with it are positive.
CANDIDATES = 64
CANDIDATE, OTHER, FLOOR = 50.0, -10.0, 1.0


def fixed_constants(op: str, names: "Sequence[str]") -> tuple[int, ...]:
    """Which arguments are constants; `BitMTPError` where nothing is known of the operation."""
    if op not in FIXED:
        raise BitMTPError(
            f"{op} is part of a step and has no inputs to time it with: add it to FIXED in "
            "bitmtp_tvm/tuning_fixed.py"
        )
    return tuple(place for place, name in enumerate(names) if name in FIXED[op])


def fixed_inputs(task: "Task") -> Inputs:
    """Arguments of a kernel that nothing is searched for, the same at every call."""
    arguments = tuple(_argument(task, name) for name in task.names)
    return Inputs(arguments, np.zeros(0), 0.0, results=0)


def _argument(task: "Task", name: str) -> np.ndarray:
    place = task.names.index(name)
    shape, dtype = task.shapes[place], task.dtypes[place]
    if name == "cache":
        return cache_of(shape)
    if name == "state":
        return _state(_rows(task))
    if name == "logits" and task.key.op == "head_rescore":
        return _scores(shape)
    if name in ("token", "tokens"):
        return np.random.default_rng(shape[0]).integers(0, _vocabulary(task), shape, np.int32)
    first, row = _boundary(task), np.arange(shape[0])
    known = {
        "boundary": first,
        "bounds": 0,
        "floor": int(np.float32(FLOOR).view(np.int32)),
        "horizon": first + row + 1,
        "logit_rows": row,
        "position": np.minimum(first + row, _positions(task) - 1),
        "seen": NEVER,
    }
    if name in known:
        return np.broadcast_to(np.asarray(known[name], dtype), shape)
    return _random(shape, dtype)


@lru_cache(maxsize=32)
def _random(shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Floats around 1; of a table that is read as bfloat16 between 1/64 and 1/32."""
    rng = np.random.default_rng(len(shape))
    if dtype == "uint16":
        return rng.integers(0x3C80, 0x3D00, shape, np.uint16)
    if dtype.startswith("float"):
        return rng.uniform(0.5, 1.5, shape).astype(dtype)
    if dtype == "int32":
        return np.zeros(shape, np.int32)
    bounds = np.iinfo(dtype)
    return rng.integers(bounds.min, bounds.max, shape, dtype, endpoint=True)


def _state(rows: int) -> np.ndarray:
    """A greedy request behind `FILL` tokens whose every row is in use, laid out already."""
    state = full_state(rows, FILL + 1, LIMIT, 0)
    state[Word.ROW_PENDING], state[Word.ROW_MASKS] = 1, rows - 1
    state[Word.ROW_BLOCKS] = rows > 1
    return state


@lru_cache(maxsize=8)
def _scores(shape: tuple[int, ...]) -> np.ndarray:
    logits = np.full(shape, OTHER, np.float32)
    logits[:, np.linspace(0, shape[1] - 1, CANDIDATES).astype(int)] = CANDIDATE
    return logits


def _shape(task: "Task", *names: str) -> tuple[int, ...] | None:
    """The shape of the first of `names` that the task has."""
    places = [task.names.index(name) for name in names if name in task.names]
    return task.shapes[places[0]] if places else None


def _rows(task: "Task") -> int:
    """Rows of a step whose state a kernel reads."""
    shape = _shape(task, "token", "tokens", "logit_rows")
    return shape[0] if shape else 1


def _vocabulary(task: "Task") -> int:
    """Ids that a token may have."""
    tiles = _shape(task, "weight_scale")
    return tiles[0] * tiles[2] if tiles else (_shape(task, "seen", "table") or (1,))[0]


def _positions(task: "Task") -> int:
    """Positions that the rotary table holds."""
    return (_shape(task, "table") or (LIMIT,))[0]


def _boundary(task: "Task") -> int:
    """Tokens in front of the rows, as `tuning_inputs` has them: as far as the cache goes."""
    cache, tops = _shape(task, "cache"), _shape(task, "tops")
    slots = cache[2] if cache else FILL + task.key.width
    if tops:
        slots = tops[2] * int(task.settings["chain_slots"])
    return min(FILL, slots - task.key.width)
