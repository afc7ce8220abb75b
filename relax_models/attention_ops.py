"""Attention as TensorIR: in one piece, or in two halves that let many blocks share a row.

Defined and stamped like the operations of `relax_models.ops`.
"""

from tvm import te, tirx

from relax_models.ops import any_width, stamped, sum_over

NEG_INF = -3.0e38
"""Score of a slot that a row does not see: finite, so that the difference of two is no NaN."""


def _scores(q, cache, boundary, visible, group: int):
    """Scores `(width, heads, slots)` of every slot, NEG_INF where a row does not see it, and the
    function that says so; `visible` is None for a causal step."""
    (width, heads, head_dim), slots = q.shape, cache.shape[2]

    def sees(i, t):
        j = t - boundary[0].astype("int64")
        if visible is None:
            return j <= i
        word = visible[i, tirx.min(tirx.max(j, tirx.const(0, "int64")), width - 1) // 32]
        bit = (word >> (j % 32).astype("uint32")) & tirx.const(1, "uint32")
        return tirx.any(j < 0, tirx.all(j < width, bit == tirx.const(1, "uint32")))

    axis = te.reduce_axis((0, head_dim), "d")
    dot = te.compute(
        (width, heads, slots),
        lambda i, h, t: te.sum(
            q[i, h, axis] * cache[0, h // group, t, axis].astype("float32"), axis=axis
        ),
        "dot",
    )
    factor = tirx.const(int(head_dim) ** -0.5, "float32")
    score = te.compute(
        dot.shape,
        lambda i, h, t: tirx.if_then_else(
            sees(i, t), dot[i, h, t] * factor, tirx.const(NEG_INF, "float32")
        ),
        "score",
    )
    return score, sees


def attention(
    num_heads: int, num_kv_heads: int, head_dim: int, slots: int, causal: bool
) -> tirx.PrimFunc:
    """Grouped-query attention of the rows of one step over the shared cache.

    q `(width, num_heads, head_dim)` float32, cache `(2, num_kv_heads, slots, head_dim)` float16,
    boundary `(1,)` int32, and unless `causal` visible `(width, 2)` uint32 ->
    `(width, num_heads * head_dim)` float32. Row i sees the slots below boundary, and slot
    boundary + j of this step where bit j % 32 of visible[i, j / 32] is set; a causal step (prefill)
    sees j <= i. Every row must see itself. Slots from boundary + width on are never read.
    """
    width = any_width()
    group = num_heads // num_kv_heads
    q = te.placeholder((width, num_heads, head_dim), "float32", "q")
    cache = te.placeholder((2, num_kv_heads, slots, head_dim), "float16", "cache")
    boundary = te.placeholder((1,), "int32", "boundary")
    visible = te.placeholder((width, 2), "uint32", "visible")

    score, _ = _scores(q, cache, boundary, None if causal else visible, group)
    slot = te.reduce_axis((0, slots), "t")
    top = te.compute((width, num_heads), lambda i, h: te.max(score[i, h, slot], axis=slot), "top")
    weight = te.compute(score.shape, lambda i, h, t: tirx.exp(score[i, h, t] - top[i, h]), "weight")
    norm = sum_over((width, num_heads), slots, lambda i, h, t: weight[i, h, t], "norm")
    mixed = sum_over(
        (width, num_heads, head_dim),
        slots,
        lambda i, h, d, t: weight[i, h, t] * cache[1, h // group, t, d].astype("float32"),
        "mixed",
    )
    out = te.compute(
        (width, num_heads * head_dim),
        lambda i, c: mixed[i, c // head_dim, c % head_dim] / norm[i, c // head_dim],
        "out",
    )
    inputs = [q, cache, boundary] if causal else [q, cache, boundary, visible]
    return stamped([*inputs, out], "attention", causal=causal)


CHAINS = 32
"""Partial sums of an attention that many blocks share."""

CHAIN_SLOTS = 64
"""Neighbouring slots that go to the same partial sum."""


def attention_parts(
    num_heads: int, num_kv_heads: int, head_dim: int, slots: int, format_name: str = ""
) -> tirx.PrimFunc:
    """The first half of `attention` with visible rows: partial sums over the slots.

    q, cache, boundary and visible as `attention` takes them -> tops, norms `(width, num_heads,
    CHAINS)` and mixed `(width, num_heads, CHAINS, head_dim)` float32. Slot t belongs to chain
    t / CHAIN_SLOTS % CHAINS: tops are the largest score of a chain that the row sees (NEG_INF for
    none), norms the sum of exp(score - top), mixed that sum of values. Chains that have no slot
    below boundary + width are not defined. `format_name`: of the weights in the kernels around it,
    which tell what tile is the best beside them.
    """
    width = any_width()
    group = num_heads // num_kv_heads
    q = te.placeholder((width, num_heads, head_dim), "float32", "q")
    cache = te.placeholder((2, num_kv_heads, slots, head_dim), "float16", "cache")
    boundary = te.placeholder((1,), "int32", "boundary")
    visible = te.placeholder((width, 2), "uint32", "visible")
    score, sees = _scores(q, cache, boundary, visible, group)
    turns = -(-slots // (CHAINS * CHAIN_SLOTS))

    def axes():
        return te.reduce_axis((0, turns), "turn"), te.reduce_axis((0, CHAIN_SLOTS), "j")

    def of(c, turn, j):
        slot = (turn * CHAINS + c) * CHAIN_SLOTS + j
        return tirx.min(slot, slots - 1), slot < slots

    def pick(i, h, c, turn, j):
        slot, exists = of(c, turn, j)
        return tirx.if_then_else(exists, score[i, h, slot], tirx.const(NEG_INF, "float32"))

    def weigh(i, h, c, at, value):
        slot, exists = of(c, *at)
        weight = tirx.exp(score[i, h, slot] - tops[i, h, c]) * value(slot)
        seen = tirx.all(exists, sees(i, slot))
        return tirx.if_then_else(seen, weight, tirx.const(0, "float32"))

    shape = (width, num_heads, CHAINS)
    ax = axes()
    tops = te.compute(shape, lambda i, h, c: te.max(pick(i, h, c, *ax), axis=ax), "tops")
    bx = axes()
    norms = te.compute(
        shape,
        lambda i, h, c: te.sum(weigh(i, h, c, bx, lambda _: tirx.const(1, "float32")), axis=bx),
        "norms",
    )
    cx = axes()
    mixed = te.compute(
        (*shape, head_dim),
        lambda i, h, c, d: te.sum(
            weigh(i, h, c, cx, lambda t: cache[1, h // group, t, d].astype("float32")), axis=cx
        ),
        "mixed",
    )
    return stamped(
        [q, cache, boundary, visible, tops, norms, mixed],
        "attention_parts",
        chains=CHAINS,
        chain_slots=CHAIN_SLOTS,
        format=format_name,
    )


def joined(num_heads: int, head_dim: int) -> tuple[list[te.Tensor], te.Tensor]:
    """What `attention_join` takes and gives."""
    width = any_width()
    shape = (width, num_heads, CHAINS)
    tops = te.placeholder(shape, "float32", "tops")
    norms = te.placeholder(shape, "float32", "norms")
    mixed = te.placeholder((*shape, head_dim), "float32", "mixed")
    boundary = te.placeholder((1,), "int32", "boundary")

    def used(c, value, otherwise):
        end = boundary[0].astype("int64") + width
        return tirx.if_then_else(c * CHAIN_SLOTS < end, value, tirx.const(otherwise, "float32"))

    ax = te.reduce_axis((0, CHAINS), "c")
    top = te.compute(
        (width, num_heads),
        lambda i, h: te.max(used(ax, tops[i, h, ax], NEG_INF), axis=ax),
        "top",
    )
    bx = te.reduce_axis((0, CHAINS), "c")
    norm = te.compute(
        (width, num_heads),
        lambda i, h: te.sum(
            used(bx, norms[i, h, bx] * tirx.exp(tops[i, h, bx] - top[i, h]), 0), axis=bx
        ),
        "norm",
    )
    cx = te.reduce_axis((0, CHAINS), "c")
    total = te.compute(
        (width, num_heads, head_dim),
        lambda i, h, d: te.sum(
            used(cx, mixed[i, h, cx, d] * tirx.exp(tops[i, h, cx] - top[i, h]), 0), axis=cx
        ),
        "total",
    )
    out = te.compute(
        (width, num_heads * head_dim),
        lambda i, c: total[i, c // head_dim, c % head_dim] / norm[i, c // head_dim],
        "out",
    )
    return [tops, norms, mixed, boundary], out


def attention_join(num_heads: int, head_dim: int) -> tirx.PrimFunc:
    """The second half of `attention`: the partial sums of `attention_parts`, in their order.

    tops, norms, mixed as it gives them, boundary `(1,)` int32 ->
    `(width, num_heads * head_dim)` float32.
    """
    inputs, out = joined(num_heads, head_dim)
    return stamped([*inputs, out], "attention_join", chain_slots=CHAIN_SLOTS)
