"""GGUF's low-bit blocks, written from their table: encoders, and decoders weight by weight.

The decoders are plain loops over single bytes, so that they share nothing with the code they test.
"""

import struct

import numpy as np

# Name: number of the type, weights and bytes of a block.
TYPES = {
    "Q1_0": (41, 128, 18),
    "Q2_0": (42, 64, 18),
    "Q2_0 wide": (42, 128, 34),
    "PQ2_0": (142, 128, 34),
    "TQ1_0": (34, 256, 54),
    "TQ2_0": (35, 256, 66),
    "I2_S": (36, 128, 32),
}
TWO_BITS = ("Q2_0", "Q2_0 wide", "PQ2_0")


def decode(name: str, data: bytes, columns: int) -> np.ndarray:
    """A tensor's bytes to weights `(N, columns)` float32."""
    size = TYPES[name][2]
    tail = 32 if name == "I2_S" else 0
    scale = struct.unpack("<f", data[-tail:][:4])[0] if tail else 1.0
    weights: list[float] = []
    for start in range(0, len(data) - tail, size):
        weights += block(name, data[start : start + size], scale)
    return np.array(weights, np.float32).reshape(-1, columns)


def block(name: str, data: bytes, scale: float) -> list[float]:
    """The weights of one block."""
    group = TYPES[name][1]
    if name == "I2_S":
        return [((data[j % 32] >> (6 - 2 * (j // 32)) & 3) - 1) * scale for j in range(group)]
    if name in ("Q1_0", *TWO_BITS):
        d, rest = struct.unpack("<e", data[:2])[0], data[2:]
        if name == "Q1_0":
            return [d if rest[j // 8] >> (j % 8) & 1 else -d for j in range(group)]
        return [((rest[j // 4] >> (2 * (j % 4)) & 3) - 1) * d for j in range(group)]
    d = struct.unpack("<e", data[-2:])[0]
    if name == "TQ2_0":
        places = [(32 * (n // 128) + n % 32, 2 * ((n % 128) // 32)) for n in range(group)]
        return [((data[byte] >> shift & 3) - 1) * d for byte, shift in places]
    return [(trit(data, n) - 1) * d for n in range(group)]


def trit(data: bytes, n: int) -> int:
    """Weight n of a TQ1_0 block: 32 bytes of five each, 16 of five, 4 of four, bytes first."""
    if n < 160:
        byte, power = n % 32, n // 32
    elif n < 240:
        byte, power = 32 + (n - 160) % 16, (n - 160) // 16
    else:
        byte, power = 48 + (n - 240) % 4, (n - 240) // 4
    return ((data[byte] * 3**power & 255) * 3) >> 8


def encode(name: str, codes: np.ndarray, scales: np.ndarray) -> bytes:
    """Codes `(N, K)` uint8 and block scales `(N, K / group)`, for I2_S one number, to bytes.

    The codes are w + 1, for Q1_0 (w + 1) / 2.
    """
    group = TYPES[name][1]
    parts = codes.reshape(-1, group)
    if name == "I2_S":
        quarters = parts.reshape(-1, 4, 32).astype(np.uint8)
        packed = quarters[:, 0] << 6 | quarters[:, 1] << 4 | quarters[:, 2] << 2 | quarters[:, 3]
        return packed.tobytes() + struct.pack("<f28x", float(scales))
    d = np.asarray(scales, np.float16).reshape(-1, 1).view(np.uint8)
    if name == "Q1_0":
        return np.hstack([d, np.packbits(parts, axis=1, bitorder="little")]).tobytes()
    if name in TWO_BITS:
        return np.hstack([d, _merged(parts.reshape(len(parts), -1, 4))]).tobytes()
    if name == "TQ2_0":
        merged = _merged(parts.reshape(-1, 2, 4, 32).transpose(0, 1, 3, 2))
        return np.hstack([merged.reshape(len(parts), -1), d]).tobytes()
    return np.hstack([_trits(parts), d]).tobytes()


def _merged(fours: np.ndarray) -> np.ndarray:
    return sum(fours[..., i].astype(np.uint8) << (2 * i) for i in range(4))


def _trits(parts: np.ndarray) -> np.ndarray:
    """Each byte q is the least with q / 256 >= the five trits read as a fraction to base 3."""
    columns = []
    for start, width, count in ((0, 32, 5), (160, 16, 5), (240, 4, 4)):
        trits = parts[:, start : start + width * count].reshape(-1, count, width)
        value = sum(trits[:, i].astype(int) * 3 ** (4 - i) for i in range(count))
        columns.append(-(-value * 256 // 243))
    return np.hstack(columns).astype(np.uint8)
