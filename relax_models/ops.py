"""The operations of low-bit models as TensorIR: what is computed, for any width, in plain loops.

Each builder returns a private PrimFunc over a symbolic `width` (rows of one step), inputs first,
results last. It carries its name in the attribute `bitmtp.op` and its settings in further
`bitmtp.*` attributes; these and the order of the buffers are all that a schedule rule may rely on.
The loops say what is meant and serve as the slow reference of the rules: no target runs them as
they stand.

Floating-point sums are plain reductions here. A rule chooses one tree for them per target, the same
at every width, so that a row's result does not depend on the bucket that it ran in.
"""

from collections.abc import Callable, Sequence

from tvm import te, tirx
from tvm.script import tirx as T

from relax_models.formats import (
    FORMATS,
    K_BLOCK,
    locate,
    packed_dtype,
    packed_shape,
    padded_k,
    row_tile,
    scales_shape,
)


def stamped(tensors: Sequence[te.Tensor], op: str, **settings) -> tirx.PrimFunc:
    """The PrimFunc of a TE computation, inputs first, under the name `op`."""
    return stamp(te.create_prim_func(list(tensors)).without_attr("global_symbol"), op, **settings)


def stamp(func: tirx.PrimFunc, op: str, **settings) -> tirx.PrimFunc:
    """`func` with the attributes that rules know it by."""
    named = {f"bitmtp.{name}": value for name, value in settings.items()}
    return func.with_attr({"bitmtp.op": op, "tirx.noalias": True, **named})


def any_width() -> tirx.Var:
    """The rows of a step, of which the definitions know nothing more."""
    return tirx.Var("width", "int64")


def _from_bf16(bits: tirx.Expr) -> tirx.Expr:
    return tirx.reinterpret(
        "float32", tirx.shift_left(bits.astype("uint32"), tirx.const(16, "uint32"))
    )


def sum_over(shape: Sequence, extent, body, name: str) -> te.Tensor:
    """A tensor of `shape` whose elements are sums of `body(*index, k)` over k below `extent`."""
    axis = te.reduce_axis((0, extent), "k")
    return te.compute(shape, lambda *i: te.sum(body(*i, axis), axis=axis), name)


def embed(vocab_size: int, hidden_size: int) -> tirx.PrimFunc:
    """Rows of the embedding table; the host has checked the ids.

    tokens `(width,)` int32, table `(vocab_size, hidden_size)` uint16 (bfloat16 bits) ->
    hidden `(width, hidden_size)` float32.
    """
    width = any_width()
    tokens = te.placeholder((width,), "int32", "tokens")
    table = te.placeholder((vocab_size, hidden_size), "uint16", "table")
    hidden = te.compute(
        (width, hidden_size), lambda i, k: _from_bf16(table[tokens[i], k]), "hidden"
    )
    return stamped([tokens, table, hidden], "embed")


def rms_norm(x: te.Tensor, weight: te.Tensor, eps: float) -> te.Tensor:
    """x / sqrt(mean(x²) + eps) · weight, row by row; rules multiply by the weight first, which a
    largest magnitude can be told of before the sum is known."""
    rows, size = x.shape
    square = sum_over((rows,), size, lambda i, k: x[i, k] * x[i, k], "square")
    mean = te.compute((rows,), lambda i: square[i] / tirx.const(int(size), "float32"), "mean")
    return te.compute(
        (rows, size),
        lambda i, k: x[i, k] / tirx.sqrt(mean[i] + tirx.const(eps, "float32")) * weight[k],
        "normed",
    )


def quantized(x: te.Tensor, group: int = 0) -> tuple[te.Tensor, te.Tensor, te.Tensor]:
    """q, scale and total of x; one scale a row, or one for each `group` columns of it."""
    rows, size = x.shape
    size = int(size)
    padded = padded_k(size)
    columns = group or padded
    shape = (rows, padded // group) if group else (rows,)

    def of_group(body, name, reduce):
        axis = te.reduce_axis((0, columns), "k")
        return te.compute(
            shape, lambda i, *g: reduce(body(i, g[0] * columns + axis if g else axis), axis), name
        )

    def magnitude(i, k):
        return tirx.if_then_else(k < size, tirx.abs(x[i, k]), tirx.const(0, "float32"))

    absmax = of_group(magnitude, "absmax", lambda value, axis: te.max(value, axis=axis))
    least = tirx.const(1e-5, "float32")
    bound = te.compute(shape, lambda *i: tirx.max(absmax[i], least), "bound")

    def code(i, k):
        limit = bound[i, k // columns] if group else bound[i]
        rounded = tirx.nearbyint(x[i, k] * (tirx.const(127, "float32") / limit))
        clipped = tirx.max(
            tirx.min(rounded, tirx.const(127, "float32")), tirx.const(-128, "float32")
        )
        return tirx.if_then_else(k < size, clipped.astype("int8"), tirx.const(0, "int8"))

    q = te.compute((rows, padded), code, "q")
    scale = te.compute(shape, lambda *i: bound[i] / tirx.const(127, "float32"), "scale")
    total = of_group(
        lambda i, k: q[i, k].astype("int32"),
        "total",
        lambda value, axis: te.sum(value, axis=axis),
    )
    return q, scale, total


def quantize(size: int, group: int) -> tirx.PrimFunc:
    """int8 quantisation with one scale for each `group` columns of a row.

    x `(width, size)` float32 -> q `(width, padded_k(size))` int8 with zeros behind `size`, scale
    `(width, padded_k(size) / group)` float32 (what one unit of q stands for), total of that shape,
    int32 (sum of the group's q).
    q = clip(round_half_even(x * (127 / max(absmax, 1e-5))), -128, 127).
    """
    x = te.placeholder((any_width(), size), "float32", "x")
    return stamped([x, *quantized(x, group)], "quantize", group=group)


def norm_quantize(size: int, eps: float, group: int = 0) -> tirx.PrimFunc:
    """RMSNorm, then int8 quantisation with one scale a row (as BitNet has it) or a group.

    x `(width, size)` float32, weight `(size,)` float32 -> q `(width, padded_k(size))` int8 with
    zeros behind `size`, scale `(width,)` float32 (what one unit of q stands for), total `(width,)`
    int32 (sum of q); with `group` scale and total are those of `quantize`.
    q = clip(round_half_even(x * (127 / max(absmax, 1e-5))), -128, 127).
    """
    x = te.placeholder((any_width(), size), "float32", "x")
    weight = te.placeholder((size,), "float32", "weight")
    results = quantized(rms_norm(x, weight, eps), group)
    return stamped([x, weight, *results], "norm_quantize", eps=eps, group=group)


def gated(gate_up: te.Tensor, size: int, activation: str) -> te.Tensor:
    """activation(gate) · up, where gate_up holds both halves side by side."""
    shape = (gate_up.shape[0], size)
    if activation == "relu2":
        gate = te.compute(
            shape, lambda i, k: tirx.max(gate_up[i, k], tirx.const(0, "float32")), "gate"
        )
        return te.compute(shape, lambda i, k: gate[i, k] * gate[i, k] * gate_up[i, size + k], "x")

    def silu(value):
        return value / (tirx.const(1, "float32") + tirx.exp(-value))

    return te.compute(shape, lambda i, k: silu(gate_up[i, k]) * gate_up[i, size + k], "x")


def gated_norm_quantize(size: int, eps: float, activation: str = "relu2") -> tirx.PrimFunc:
    """The middle of BitNet's MLP: relu(gate)² · up ("relu2") or silu(gate) · up ("silu"), then
    RMSNorm and int8 quantisation.

    gate_up `(width, 2 * size)` float32 (gate, then up), weight `(size,)` float32 -> q, scale, total
    as `norm_quantize` gives them. float32 throughout: the square overflows float16.
    """
    gate_up = te.placeholder((any_width(), 2 * size), "float32", "gate_up")
    weight = te.placeholder((size,), "float32", "weight")
    results = quantized(rms_norm(gated(gate_up, size, activation), weight, eps))
    return stamped(
        [gate_up, weight, *results], "gated_norm_quantize", eps=eps, activation=activation
    )


def gated_quantize(size: int, group: int) -> tirx.PrimFunc:
    """The middle of a SwiGLU: silu(gate) · up, then int8 quantisation by groups.

    gate_up `(width, 2 * size)` float32 (gate, then up) -> q, scale, total as `quantize` gives them.
    """
    gate_up = te.placeholder((any_width(), 2 * size), "float32", "gate_up")
    results = quantized(gated(gate_up, size, "silu"), group)
    return stamped([gate_up, *results], "gated_quantize", group=group)


def qk_norm(num_heads: int, num_kv_heads: int, head_dim: int, eps: float) -> tirx.PrimFunc:
    """RMSNorm of every query and key head, values as they are (Qwen3).

    qkv `(width, (num_heads + 2 * num_kv_heads) * head_dim)` float32, q_norm and k_norm
    `(head_dim,)` float32 -> the same shape as qkv.
    """
    first_v = num_heads + num_kv_heads
    heads = first_v + num_kv_heads
    width = any_width()
    qkv = te.placeholder((width, heads * head_dim), "float32", "qkv")
    q_norm = te.placeholder((head_dim,), "float32", "q_norm")
    k_norm = te.placeholder((head_dim,), "float32", "k_norm")
    square = sum_over(
        (width, first_v),
        head_dim,
        lambda i, h, d: qkv[i, h * head_dim + d] * qkv[i, h * head_dim + d],
        "square",
    )

    def normed(i, c):
        h, d = c // head_dim, c % head_dim
        mean = square[i, tirx.min(h, first_v - 1)] / tirx.const(head_dim, "float32")
        weight = tirx.if_then_else(h < num_heads, q_norm[d], k_norm[d])
        value = qkv[i, c] / tirx.sqrt(mean + tirx.const(eps, "float32")) * weight
        return tirx.if_then_else(h < first_v, value, qkv[i, c])

    out = te.compute(qkv.shape, normed, "normed")
    return stamped(
        [qkv, q_norm, k_norm, out],
        "qk_norm",
        eps=eps,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
    )


def low_bit_linear(
    segments: Sequence[int], size: int, kind: str, format_name: str, residual: bool = False
) -> tirx.PrimFunc:
    """int8 activations times ternary or binary weights, exact in int32 up to the scales.

    q, scale, total as `norm_quantize` gives them for the format's group, weight packed in the
    layout of target `kind` (relax_models/formats.py), weight_scale, residual
    `(width, sum(segments))` float32 if asked for -> y `(width, sum(segments))` float32. The integer
    sum is v = Σ code·q - total (ternary, code = weight + 1) or 2 Σ code·q - total (binary, code =
    (weight + 1) / 2).

    Without groups ("bitnet-ternary") weight_scale is `(len(segments),)` float32, one for each
    original matrix, whose rows `segments` counts: y = v · (scale · weight_scale) [+ residual]. With
    groups it is float16 in the layout's `scales_shape`:
    y = Σ_g v_g · (scale_g · weight_scale_g) [+ residual].
    """
    form, padded, width = FORMATS[format_name], padded_k(size), any_width()
    shape = (width, padded // form.group) if form.group else (width,)
    q = te.placeholder((width, padded), "int8", "q")
    scale = te.placeholder(shape, "float32", "scale")
    total = te.placeholder(shape, "int32", "total")
    weights, dot = low_bit_dots(q, scale, total, segments, size, kind, format_name)
    added, y = with_residual(dot, residual)
    return stamped(
        [q, scale, total, *weights, *added, y],
        "low_bit_linear",
        format=format_name,
        segments=list(segments),
        residual=residual,
        size=size,
    )


def with_residual(dot: te.Tensor, residual: bool) -> tuple[list[te.Tensor], te.Tensor]:
    """The residual's placeholder, where one is asked for, and `dot` plus it."""
    added = [te.placeholder(dot.shape, "float32", "residual")] if residual else []
    return added, te.compute(dot.shape, lambda i, n: sum((t[i, n] for t in added), dot[i, n]), "y")


def low_bit_dots(
    q: te.Tensor,
    scale: te.Tensor,
    total: te.Tensor,
    segments: Sequence[int],
    size: int,
    kind: str,
    format_name: str,
) -> tuple[list[te.Tensor], te.Tensor]:
    """The placeholders of a linear's weights and scales, and its results without a residual; see
    `low_bit_linear`."""
    form, rows = FORMATS[format_name], sum(segments)
    width, padded = q.shape
    weight = te.placeholder(packed_shape(kind, rows, size, form.bits), packed_dtype(kind), "weight")
    if form.group:
        weight_scale = te.placeholder(
            scales_shape(kind, rows, size, form.bits), "float16", "weight_scale"
        )
        dot = _group_dots(q, scale, total, weight, weight_scale, kind, form, rows)
        return [weight, weight_scale], dot
    weight_scale = te.placeholder((len(segments),), "float32", "weight_scale")
    exact = sum_over((width, rows), padded, _products(q, weight, kind, form.bits), "exact")
    dot = te.compute(
        (width, rows),
        lambda i, n: (
            (exact[i, n] - total[i]).astype("float32")
            * (scale[i] * weight_scale[segment_of(n, segments)])
        ),
        "dot",
    )
    return [weight, weight_scale], dot


def _code(weight: te.Tensor, kind: str, bits: int, n, k) -> tirx.Expr:
    index, shift = locate(kind, n, k, bits)
    mask = tirx.const((1 << bits) - 1, weight.dtype)
    return (weight[index] >> shift.astype(weight.dtype)) & mask


def _products(q: te.Tensor, weight: te.Tensor, kind: str, bits: int):
    return lambda i, n, k: _code(weight, kind, bits, n, k).astype("int32") * q[i, k].astype("int32")


def _group_dots(q, scale, total, weight, weight_scale, kind, form, rows) -> te.Tensor:
    """Σ_g v_g · (scale_g · weight_scale_g): `(width, rows)` float32."""
    width, groups = scale.shape
    product = _products(q, weight, kind, form.bits)
    exact = sum_over(
        (width, rows, groups),
        K_BLOCK,
        lambda i, n, g, k: product(i, n, g * K_BLOCK + k),
        "exact",
    )
    tile, doubled = row_tile(kind, form.bits), tirx.const(2 if form.bits == 1 else 1, "int32")

    def term(i, n, g):
        value = (doubled * exact[i, n, g] - total[i, g]).astype("float32")
        return value * (scale[i, g] * weight_scale[n // tile, g, n % tile].astype("float32"))

    return sum_over((width, rows), groups, term, "dot")


def low_bit_embed(vocab_size: int, hidden_size: int, kind: str, format_name: str) -> tirx.PrimFunc:
    """Rows of an embedding table with group scales; the host has checked the ids.

    tokens `(width,)` int32, weight packed `(vocab_size, hidden_size)`, weight_scale float16 as
    `low_bit_linear` takes them -> hidden `(width, hidden_size)` float32 = weight · weight_scale.
    """
    form, width = FORMATS[format_name], any_width()
    tile = row_tile(kind, form.bits)
    tokens = te.placeholder((width,), "int32", "tokens")
    shape = packed_shape(kind, vocab_size, hidden_size, form.bits)
    weight = te.placeholder(shape, packed_dtype(kind), "weight")
    shape = scales_shape(kind, vocab_size, hidden_size, form.bits)
    weight_scale = te.placeholder(shape, "float16", "weight_scale")
    doubled = tirx.const(2 if form.bits == 1 else 1, "int32")

    def value(i, k):
        n = tokens[i]
        signed = doubled * _code(weight, kind, form.bits, n, k).astype("int32") - 1
        return signed.astype("float32") * weight_scale[n // tile, k // K_BLOCK, n % tile].astype(
            "float32"
        )

    hidden = te.compute((width, hidden_size), value, "hidden")
    return stamped([tokens, weight, weight_scale, hidden], "low_bit_embed", format=format_name)


def segment_of(n: tirx.Expr, segments: Sequence[int]) -> tirx.Expr:
    """Index of the original matrix that row `n` of a fused one comes from."""
    index: tirx.Expr = tirx.const(0, "int64")
    for i in range(1, len(segments)):
        first = tirx.const(sum(segments[:i]), "int64")
        index = tirx.if_then_else(n >= first, tirx.const(i, "int64"), index)
    return index


def rope_kv_write(
    num_heads: int, num_kv_heads: int, head_dim: int, positions: int, slots: int
) -> tirx.PrimFunc:
    """Rotate-half RoPE on q and k, and k and v of every row into the cache, in place.

    qkv `(width, (num_heads + 2 * num_kv_heads) * head_dim)` float32, position `(width,)` int32,
    boundary `(1,)` int32, table `(positions, head_dim / 2, 2)` float32 (cos, sin), cache
    `(2, num_kv_heads, slots, head_dim)` float16 -> q `(width, num_heads, head_dim)` float32; row
    i's k and v go to slot boundary + i. The caller keeps boundary + width <= slots and every
    position below `positions`.
    """
    half, columns = head_dim // 2, (num_heads + 2 * num_kv_heads) * head_dim
    write = rope_writer(num_heads, num_kv_heads, head_dim)

    @T.prim_func(private=True, s_tir=True)
    def func(
        qkv_: T.handle,
        position_: T.handle,
        boundary: T.Buffer((1,), "int32"),
        table: T.Buffer((positions, half, 2), "float32"),
        cache: T.Buffer((2, num_kv_heads, slots, head_dim), "float16"),
        q_: T.handle,
    ):
        width = T.int64()
        qkv = T.match_buffer(qkv_, (width, columns), "float32")
        position = T.match_buffer(position_, (width,), "int32")
        q = T.match_buffer(q_, (width, num_heads, head_dim), "float32")
        write(qkv, position, boundary, table, cache, q, width)

    return stamp(func, "rope_kv_write")


def rope_writer(num_heads: int, num_kv_heads: int, head_dim: int) -> Callable:
    """A macro that rotates x, writes its k and v to the cache and leaves its q in `q`: the body of
    `rope_kv_write`."""
    half, first_k = head_dim // 2, num_heads * head_dim
    first_v = first_k + num_kv_heads * head_dim

    @T.macro
    def write(x, position, boundary, table, cache, q, width):
        for i, h, d in T.grid(width, num_heads, half):
            with T.sblock("rotate_q"):
                vi, vh, vd = T.axis.remap("SSS", [i, h, d])
                q[vi, vh, vd] = turned_low(x, table, vi, vh * head_dim + vd, position[vi], vd)
                q[vi, vh, half + vd] = turned_high(
                    x, table, vi, vh * head_dim + vd, position[vi], vd
                )
        for i, h, d in T.grid(width, num_kv_heads, half):
            with T.sblock("rotate_k"):
                vi, vh, vd = T.axis.remap("SSS", [i, h, d])
                cache[0, vh, boundary[0] + vi, vd] = T.Cast(
                    "float16",
                    turned_low(x, table, vi, first_k + vh * head_dim + vd, position[vi], vd),
                )
                cache[0, vh, boundary[0] + vi, half + vd] = T.Cast(
                    "float16",
                    turned_high(x, table, vi, first_k + vh * head_dim + vd, position[vi], vd),
                )
        for i, h, d in T.grid(width, num_kv_heads, head_dim):
            with T.sblock("write_v"):
                vi, vh, vd = T.axis.remap("SSS", [i, h, d])
                cache[1, vh, boundary[0] + vi, vd] = T.Cast(
                    "float16", x[vi, first_v + vh * head_dim + vd]
                )

    return write


def turned_low(x, table, i, c, position, d):
    """RoPE of column c of row i, which is column d of a head's lower half."""
    half = table.shape[1]
    # A sum and no difference: compilers fuse the last product of a sum of two, and differ about a
    # difference of two, so this is what makes all processors round alike.
    return x[i, c] * table[position, d, 0] + (-x[i, c + half]) * table[position, d, 1]


def turned_high(x, table, i, c, position, d):
    """RoPE of the column that is half a head behind c."""
    half = table.shape[1]
    return x[i, c + half] * table[position, d, 0] + x[i, c] * table[position, d, 1]


def final_norm(size: int, eps: float) -> tirx.PrimFunc:
    """RMSNorm of the rows that ask for logits.

    x `(width, size)` float32, weight `(size,)` float32, logit_rows `(rows,)` int32 ->
    `(rows, size)` float32. An entry below 0 asks for nothing and gives zeros.
    """
    x = te.placeholder((any_width(), size), "float32", "x")
    weight = te.placeholder((size,), "float32", "weight")
    rows = tirx.Var("rows", "int64")
    logit_rows = te.placeholder((rows,), "int32", "logit_rows")
    picked = te.compute(
        (rows, size),
        lambda i, k: tirx.if_then_else(
            logit_rows[i] >= 0, x[logit_rows[i], k], tirx.const(0, "float32")
        ),
        "picked",
    )
    normed = rms_norm(picked, weight, eps)
    return stamped([x, weight, logit_rows, normed], "final_norm", eps=eps)


def head(vocab_size: int, size: int) -> tirx.PrimFunc:
    """Logits of the rows that ask for them, over a bfloat16 table, summed in float32.

    x `(rows, size)` float32, table `(vocab_size, size)` uint16 (bfloat16 bits), logit_rows
    `(rows,)` int32 -> logits `(rows, vocab_size)` float32; what stands in rows that ask for nothing
    (an entry below 0) is not defined.
    """
    rows = tirx.Var("rows", "int64")
    x = te.placeholder((rows, size), "float32", "x")
    table = te.placeholder((vocab_size, size), "uint16", "table")
    logit_rows = te.placeholder((rows,), "int32", "logit_rows")
    dot = sum_over(
        (rows, vocab_size), size, lambda i, v, k: x[i, k] * _from_bf16(table[v, k]), "dot"
    )
    logits = te.compute(
        dot.shape,
        lambda i, v: tirx.if_then_else(logit_rows[i] >= 0, dot[i, v], tirx.const(0, "float32")),
        "logits",
    )
    return stamped([x, table, logit_rows, logits], "head")


def is_nan(x: tirx.Expr) -> tirx.Expr:
    """True for a float32 NaN, asked of its bits: TVM takes `x == x` for granted."""
    magnitude = tirx.reinterpret("uint32", x) & tirx.const(0x7FFFFFFF, "uint32")
    return magnitude > tirx.const(0x7F800000, "uint32")


def greedy(vocab_size: int) -> tirx.PrimFunc:
    """The token with the largest logit, the lowest id where several share it.

    logits `(rows, vocab_size)` float32, logit_rows `(rows,)` int32 -> tokens `(rows,)` int32; -1
    for a row that asks for nothing, for one with a NaN and for one without a finite logit.
    """

    @T.prim_func(private=True, s_tir=True)
    def func(logits_: T.handle, logit_rows_: T.handle, tokens_: T.handle):
        rows = T.int64()
        logits = T.match_buffer(logits_, (rows, vocab_size), "float32")
        logit_rows = T.match_buffer(logit_rows_, (rows,), "int32")
        tokens = T.match_buffer(tokens_, (rows,), "int32")
        best = T.sblock_alloc_buffer((rows,), "float32")
        broken = T.sblock_alloc_buffer((rows,), "bool")
        for i in range(rows):
            with T.sblock("greedy"):
                vi = T.axis.spatial(rows, i)
                tokens[vi] = -1
                best[vi] = T.min_value("float32")
                broken[vi] = logit_rows[vi] < 0
                for v in range(vocab_size):
                    if is_nan(logits[vi, v]):
                        broken[vi] = T.bool(True)
                    if logits[vi, v] > best[vi]:
                        best[vi] = logits[vi, v]
                        tokens[vi] = T.Cast("int32", v)
                if broken[vi]:
                    tokens[vi] = -1

    return stamp(func, "greedy")
