"""Every operation of the models in numpy: slow, plain, float32, and the judge of every kernel.

W rows go through one forward; K is the inner size of a linear and Kp its padded size; G = Kp / 128
groups share a scale where the format has groups.
"""

from collections.abc import Sequence

import numpy as np

from relax_models.formats import K_BLOCK, bf16_to_float32, padded_k

_LEAST_ABSMAX = np.float32(1e-5)
# float32 holds every whole number up to here, so sums of small integers below it are exact.
_EXACT_FLOAT = 1 << 24


def embed(tokens: np.ndarray, table: np.ndarray) -> np.ndarray:
    """Rows of the table: tokens `(W,)` int32, table `(V, H)` bfloat16 bits -> `(W, H)` float32."""
    return bf16_to_float32(table[tokens])


def low_bit_embed(
    tokens: np.ndarray, codes: np.ndarray, scales: np.ndarray, bits: int
) -> np.ndarray:
    """Rows of a low-bit table: `dequantize` of codes `(V, H)`, scales `(V, G)` at tokens `(W,)`."""
    return dequantize(codes[tokens], scales[tokens], bits)


def dequantize(codes: np.ndarray, scales: np.ndarray, bits: int) -> np.ndarray:
    """Weights: codes `(N, K)` uint8, group scales `(N, G)` float16 -> `(N, K)` float32.

    (code - 1) * scale for two bits, (2 * code - 1) * scale for one.
    """
    factor = 2 if bits == 1 else 1
    wide = np.repeat(scales.astype(np.float32), K_BLOCK, axis=1)[:, : codes.shape[1]]
    return (factor * codes.astype(np.float32) - 1) * wide


def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    """x / sqrt(mean(x^2) + eps) * weight: x `(…, K)`, weight `(K,)` -> `(…, K)`, all float32."""
    mean = np.mean(x * x, axis=-1, keepdims=True, dtype=np.float32)
    return x * weight * (np.float32(1) / np.sqrt(mean + np.float32(eps)))


def quantize(x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """int8 activations, one scale a row: x `(W, K)` float32 -> q, scale, total.

    q `(W, Kp)` int8 = clip(rint(x * (127 / m)), -128, 127) with m = max(absmax, 1e-5) of the row,
    zero in the padding; scale `(W,)` float32 = m / 127; total `(W,)` int32 = the sum of q's row.
    """
    rows, k = x.shape
    largest = np.maximum(np.max(np.abs(x), axis=-1), _LEAST_ABSMAX)
    q = np.zeros((rows, padded_k(k)), np.int8)
    scaled = x * (np.float32(127) / largest)[:, None]
    q[:, :k] = np.clip(np.rint(scaled), -128, 127)
    return q, largest / np.float32(127), q.sum(axis=-1, dtype=np.int32)


def quantize_groups(x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """int8 activations, one scale for every 128 columns of a row: x `(W, K)` -> q, scale, total.

    Every group as `quantize` makes a row: q `(W, Kp)` int8, scale `(W, G)` float32, total `(W, G)`
    int32.
    """
    rows, k = x.shape
    padded = np.zeros((rows, padded_k(k)), np.float32)
    padded[:, :k] = x
    q, scale, total = quantize(padded.reshape(-1, K_BLOCK))
    return q.reshape(rows, -1), scale.reshape(rows, -1), total.reshape(rows, -1)


def low_bit_accumulate(q: np.ndarray, codes: np.ndarray) -> np.ndarray:
    """Exact sum over k of code * q: q `(W, Kp)` int8, codes `(N, K)` uint8 -> `(W, N)` int32.

    Codes stand for weight + 1; the padding of q is 0, so the codes need none.
    """
    k = codes.shape[1]
    if k * 2 * 128 < _EXACT_FLOAT:
        return (q[:, :k].astype(np.float32) @ codes.astype(np.float32).T).astype(np.int32)
    return q[:, :k].astype(np.int32) @ codes.astype(np.int32).T


def low_bit_linear(
    q: np.ndarray,
    scale: np.ndarray,
    total: np.ndarray,
    codes: np.ndarray,
    weight_scales: np.ndarray,
    segments: Sequence[int],
) -> np.ndarray:
    """(acc - total) * (scale * weight_scale) -> `(W, N)` float32.

    q, scale, total as `quantize` gives them; codes `(N, K)` uint8; weight_scales `(parts,)`
    float32, one for each of `segments`, the rows of the parts of a fused matrix.
    """
    accumulated = low_bit_accumulate(q, codes) - total[:, None]
    per_column = np.repeat(np.asarray(weight_scales, np.float32), segments)
    return accumulated.astype(np.float32) * (scale[:, None] * per_column[None, :])


def group_linear(
    q: np.ndarray,
    scale: np.ndarray,
    total: np.ndarray,
    codes: np.ndarray,
    scales: np.ndarray,
    bits: int,
) -> np.ndarray:
    """Σ_g (scale_g * scales_g) * v_g -> `(W, N)` float32, groups added in ascending order.

    q, scale, total as `quantize_groups` gives them; codes `(N, K)` uint8, scales `(N, G)` float16.
    v_g = Σ code * q - total (two bits) or 2 Σ code * q - total (one bit), exact.
    """
    out = np.zeros((len(q), len(codes)), np.float32)
    wide = scales.astype(np.float32)
    for g in range(scale.shape[1]):
        columns = slice(g * K_BLOCK, (g + 1) * K_BLOCK)
        accumulated = low_bit_accumulate(q[:, columns], codes[:, columns])
        if bits == 1:
            accumulated *= 2
        v = (accumulated - total[:, g, None]).astype(np.float32)
        out += (scale[:, g, None] * wide[None, :, g]) * v
    return out


def silu(x: np.ndarray) -> np.ndarray:
    """x / (1 + exp(-x)), float32."""
    # exp overflows to infinity for very negative x, where the quotient is 0 as it should be.
    with np.errstate(over="ignore"):
        return x / (np.float32(1) + np.exp(-x))


def gated(gate: np.ndarray, up: np.ndarray, activation: str = "relu2") -> np.ndarray:
    """relu(gate)^2 * up ("relu2") or silu(gate) * up ("silu"): all `(W, F)` float32."""
    if activation == "silu":
        return silu(gate) * up
    positive = np.maximum(gate, np.float32(0))
    return positive * positive * up


def gated_norm_quantize(
    gate: np.ndarray, up: np.ndarray, weight: np.ndarray, eps: float, activation: str = "relu2"
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """`quantize(rms_norm(gated(…)))`: gate, up `(W, F)`, weight `(F,)`, all float32."""
    return quantize(rms_norm(gated(gate, up, activation), weight, eps))


def gated_quantize(gate: np.ndarray, up: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """`quantize_groups(silu(gate) * up)`: gate, up `(W, F)` float32."""
    return quantize_groups(gated(gate, up, "silu"))


def qk_norm(
    qkv: np.ndarray, q_norm: np.ndarray, k_norm: np.ndarray, heads: int, eps: float
) -> np.ndarray:
    """RMSNorm of each query and key head, before RoPE; values stay.

    qkv `(W, (heads + 2 * kv_heads) * D)` float32, q_norm, k_norm `(D,)` -> the shape of qkv.
    """
    parts = qkv.reshape(len(qkv), -1, len(q_norm)).copy()
    values = heads + (parts.shape[1] - heads) // 2
    parts[:, :heads] = rms_norm(parts[:, :heads], q_norm, eps)
    parts[:, heads:values] = rms_norm(parts[:, heads:values], k_norm, eps)
    return parts.reshape(qkv.shape)


def rope(x: np.ndarray, positions: np.ndarray, table: np.ndarray) -> np.ndarray:
    """Rotate-half rotary embedding, float32: element i pairs with i + D/2.

    x `(W, heads, D)`, positions `(W,)` int32, table `(positions, D/2, 2)` of cos and sin.
    """
    half = x.shape[-1] // 2
    cos, sin = table[positions, None, :, 0], table[positions, None, :, 1]
    first, second = x[..., :half], x[..., half:]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def attention(
    q: np.ndarray, k_cache: np.ndarray, v_cache: np.ndarray, boundary: int, visible: np.ndarray
) -> np.ndarray:
    """Softmax attention of W rows that see slots [0, boundary) and some of each other.

    q `(W, Hq, D)` float32; k_cache, v_cache `(Hkv, slots, D)` float32 with this step's rows already
    at slots boundary + i; visible `(W, W)` bool: row i sees slot boundary + j. -> `(W, Hq * D)`.
    """
    rows, heads, width = q.shape
    group = heads // k_cache.shape[0]
    slots = boundary + rows
    seen = np.concatenate([np.ones((rows, boundary), bool), visible], axis=1)
    out = np.empty_like(q)
    for h in range(heads):
        keys, values = k_cache[h // group, :slots], v_cache[h // group, :slots]
        scores = q[:, h] @ keys.T * np.float32(width**-0.5)
        scores = np.where(seen, scores, np.float32(-np.inf))
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        out[:, h] = weights @ values / weights.sum(axis=-1, keepdims=True)
    return out.reshape(rows, heads * width)


def head(x: np.ndarray, table: np.ndarray) -> np.ndarray:
    """Logits: x `(R, H)` float32, table `(V, H)` bfloat16 bits -> `(R, V)` float32."""
    return x @ bf16_to_float32(table).T


def greedy(logits: np.ndarray) -> np.ndarray:
    """Index of the largest logit, the lowest one on ties: `(R, V)` float32 -> `(R,)` int32.

    -1 for a row that holds a NaN, or nothing but -inf.
    """
    highest = logits.max(axis=-1)
    broken = np.isnan(highest) | (highest == -np.inf)
    return np.where(broken, -1, logits.argmax(axis=-1)).astype(np.int32)
