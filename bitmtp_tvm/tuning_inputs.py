"""Arguments that kernels are tuned with, as a model would give them, and what must come out."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from bitmtp_tvm.errors import BitMTPError
from bitmtp_tvm.reference.head_bound import code_head, plain_request
from bitmtp_tvm.reference.ops import (
    attention,
    gated,
    group_linear,
    low_bit_linear,
    quantize,
    quantize_groups,
    rms_norm,
    rope,
)
from relax_models.bounded_head import LEAST_FLOOR, ROW_TILE
from relax_models.formats import K_BLOCK, get_format, pack, pack_scales

if TYPE_CHECKING:
    from bitmtp_tvm.tuning_plan import Task

# Of the largest result: exact sums differ by their last rounding, sums of floats by their order.
TOLERANCE = {False: 1e-6, True: 1e-5}
# A value on the edge between two int8 codes may go to either.
CODE_TOLERANCE = 2e-3
ATTENTION_TOLERANCE = 1e-4

# Slots of the cache that attention is tuned with, as far as the cache goes.
FILL = 512
MOST_FILLED = 1024
VISIBLE_BITS = 32

# An activation's int8 as large as this, of random signs, leaves sums within int32; and the tiles of
# 16 rows of the table that are compared with the twin.
HEAD_CODE = 63
HEAD_TILES = 64

Results = list[np.ndarray]


@dataclass(frozen=True)
class Inputs:
    """arguments: all of a kernel's, the results last and NaN; expected: what the numpy twin makes
    of them; tolerance: how far a kernel may be from it, absolutely; value: what is compared, of a
    kernel's results; results: how many it has."""

    arguments: tuple[np.ndarray, ...]
    expected: np.ndarray
    tolerance: float
    value: Callable[[Results], np.ndarray] = lambda results: results[-1]
    results: int = 1


@dataclass(frozen=True)
class Operation:
    """What tuning knows of an operation.

    constants: the arguments that another layer has anew, which a model reads from memory: weights,
    or the cache; reads: bytes of them that one launch has to read, of a task.
    """

    constants: tuple[int, ...]
    make: Callable[["Task", str], Inputs]
    reads: Callable[["Task"], int] | None = None


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


def _fused_linear(task: "Task", kind: str) -> Inputs:
    """See `relax_models.fused_ops.norm_low_bit_linear` and `quantize_low_bit_linear`."""
    settings, form = task.settings, get_format(task.key.format)
    segments, size = list(settings["segments"]), int(settings["size"])
    codes, scales, *weights = _weights(sum(segments), len(segments), size, form.name, kind)
    rng = np.random.default_rng([size, 2])
    x = rng.normal(size=(task.key.width, size)).astype(np.float32)
    inputs, row = [x], x
    if task.key.op.startswith("norm_"):
        inputs.append(rng.uniform(0.5, 1.5, size).astype(np.float32))
        row = rms_norm(x, inputs[1], float(settings["eps"]))
    if form.group:
        expected = group_linear(*quantize_groups(row), codes, scales, form.bits)
    else:
        expected = low_bit_linear(*quantize(row), codes, scales, segments)
    if settings["activation"]:
        gate, up = np.split(expected, [segments[0]], axis=1)
        expected = gated(gate, up, settings["activation"])
    added = []
    if task.key.residual:
        added = [rng.normal(size=expected.shape).astype(np.float32)]
        expected = expected + added[0]
    result = np.full(expected.shape, np.nan, np.float32)
    tolerance = CODE_TOLERANCE * float(np.abs(expected).max())
    return Inputs((*inputs, *weights, *added, result), expected, tolerance)


@lru_cache(maxsize=4)
def cache_of(shape: tuple[int, ...]) -> np.ndarray:
    """Keys and values of a layer: the same in every kernel that has such a cache."""
    filled = min(MOST_FILLED, shape[2])
    cache = np.zeros(shape, np.float16)
    cache[:, :, :filled] = np.random.default_rng(shape[3]).normal(
        size=(2, shape[1], filled, shape[3])
    )
    return cache


def _attended(task: "Task") -> tuple[list[np.ndarray], np.ndarray]:
    """q, cache and boundary of a step whose rows see what is in front of them, and its result."""
    (width, heads, head_dim), cache_shape = task.shapes[:2]
    boundary = min(FILL, cache_shape[2] - width)
    cache = cache_of(cache_shape)
    q = np.random.default_rng(head_dim).normal(size=(width, heads, head_dim)).astype(np.float32)
    keys, values = cache[:, :, : boundary + width]
    expected = attention(q, keys, values, boundary, np.tri(width, dtype=bool))
    return [q, cache, np.array([boundary], np.int32)], expected


def _attention(task: "Task", kind: str) -> Inputs:
    """See `relax_models.attention_ops.attention`."""
    arguments, expected = _attended(task)
    arguments += [] if task.settings["causal"] else [_visible(task.key.width)]
    result = np.full(expected.shape, np.nan, np.float32)
    return Inputs((*arguments, result), expected, ATTENTION_TOLERANCE)


def _attention_parts(task: "Task", kind: str) -> Inputs:
    """See `relax_models.attention_ops.attention_parts`."""
    arguments, expected = _attended(task)
    return _in_parts(task, arguments, int(arguments[2][0]), expected)


def _rope_attention_parts(task: "Task", kind: str) -> Inputs:
    """See `relax_models.fused_attention_ops.rope_attention_parts`; a launch after another finds the
    cache written, and reads nothing of that."""
    qkv_shape, _, _, table_shape, cache_shape = task.shapes[:5]
    width, heads, _, head_dim = task.shapes[-1]
    boundary, keys = min(FILL, cache_shape[2] - width), heads + cache_shape[1]
    rng = np.random.default_rng([width, head_dim, 3])
    qkv = rng.normal(size=qkv_shape).astype(np.float32)
    position = np.arange(width, dtype=np.int32)
    angle = rng.uniform(0, 2 * np.pi, table_shape[:2])
    table = np.stack([np.cos(angle), np.sin(angle)], axis=-1).astype(np.float32)
    cache = cache_of(cache_shape)
    rows = qkv.reshape(width, -1, head_dim)
    turned = rope(rows[:, :keys], position, table)
    written = cache[:, :, : boundary + width].copy()
    written[0, :, boundary:] = turned[:, heads:].transpose(1, 0, 2)
    written[1, :, boundary:] = rows[:, keys:].transpose(1, 0, 2)
    seen = np.tri(width, dtype=bool)
    expected = attention(turned[:, :heads], written[0], written[1], boundary, seen)
    arguments = [qkv, position, np.array([boundary], np.int32), table, cache]
    return _in_parts(task, arguments, boundary, expected)


def _in_parts(
    task: "Task", arguments: list[np.ndarray], boundary: int, expected: np.ndarray
) -> Inputs:
    """Of an operation whose results are partial sums: those in use are compared as joined."""
    results = tuple(np.full(shape, np.nan, np.float32) for shape in task.shapes[-3:])
    slots, chains = int(task.settings["chain_slots"]), int(task.settings["chains"])
    used = min(chains, -(-(boundary + task.key.width) // slots))

    def whole(found: Results) -> np.ndarray:
        tops, norms, mixed = (part[:, :, :used] for part in found)
        factor = np.exp(tops - tops.max(axis=2, keepdims=True))
        mean = (mixed * factor[..., None]).sum(axis=2) / (norms * factor).sum(axis=2)[..., None]
        return mean.reshape(expected.shape)

    visible = _visible(task.key.width)
    return Inputs(
        (*arguments, visible, *results), expected, ATTENTION_TOLERANCE, whole, len(results)
    )


def _head_codes(task: "Task", kind: str) -> Inputs:
    """See `relax_models.head_ops.head_codes`; of the logits, some rows of the table are compared:
    the twin of all of them would take gigabytes."""
    q_shape, spread_shape, codes_shape, bounds_shape = task.shapes[:4]
    width, vocab_size = task.shapes[-1]
    rng = np.random.default_rng([vocab_size, q_shape[-1]])
    codes = rng.integers(0, 1 << 32, codes_shape, np.uint32)
    bounds = rng.uniform(1e-3, 2e-3, bounds_shape).astype(np.float32)
    rng = np.random.default_rng(q_shape[-1])
    q = rng.integers(-HEAD_CODE, HEAD_CODE + 1, q_shape, np.int8)
    spread = rng.uniform(1e-4, 2e-4, spread_shape).astype(np.float32)
    asked = np.arange(width, dtype=np.int32)
    # No penalty, and nothing seen.
    penalty = [np.zeros(s, d) for s, d in zip(task.shapes[5:-2], task.dtypes[5:-2], strict=True)]
    tiles = np.unique(np.linspace(0, codes_shape[0] - 1, HEAD_TILES).astype(int))
    rows = (tiles[:, None] * ROW_TILE + np.arange(ROW_TILE)).ravel()
    size, request = codes_shape[1] * K_BLOCK, plain_request(width, len(rows))
    expected, _ = code_head(q, spread, codes[tiles], bounds[:, rows], size, request)
    # Behind the vocabulary the last tile holds nothing.
    expected, rows = expected[:, rows < vocab_size], rows[rows < vocab_size]
    floor, logits = np.full(width, LEAST_FLOOR, np.int32), np.full((width, vocab_size), np.nan)
    return Inputs(
        (q, spread, codes, bounds, asked, *penalty, floor, logits.astype(np.float32)),
        expected,
        TOLERANCE[False] * float(np.abs(expected).max()),
        lambda results: results[-1][:, rows],
        results=2,
    )


def _visible(width: int) -> np.ndarray:
    """Masks `(width, 2)` uint32 of rows that see all in front of them and themselves."""
    masks = [(2 << row) - 1 for row in range(width)]
    low = (1 << VISIBLE_BITS) - 1
    return np.array([(mask & low, mask >> VISIBLE_BITS) for mask in masks], np.uint32)


def _cache_reads(task: "Task") -> int:
    """Keys and values of the slots in use."""
    _, kv_heads, slots, head_dim = next(shape for shape in task.shapes if len(shape) == 4)
    return 4 * kv_heads * min(FILL + task.key.width, slots) * head_dim


OPERATIONS = {
    "attention": Operation((1,), _attention, _cache_reads),
    "attention_parts": Operation((1,), _attention_parts, _cache_reads),
    "head_codes": Operation((2, 3), _head_codes),
    "low_bit_linear": Operation((3, 4), _low_bit_linear),
    "norm_low_bit_linear": Operation((2, 3), _fused_linear),
    "quantize_low_bit_linear": Operation((1, 2), _fused_linear),
    "rope_attention_parts": Operation((4,), _rope_attention_parts, _cache_reads),
}


def is_right(inputs: Inputs, got: Results) -> bool:
    """Whether a kernel's results are those of the twin."""
    value = inputs.value(got)
    return value.shape == inputs.expected.shape and bool(
        (np.abs(value - inputs.expected) <= inputs.tolerance).all()
    )


def joined(got: Results) -> bytes:
    """All results, to compare bit by bit."""
    return b"".join(result.tobytes() for result in got)
