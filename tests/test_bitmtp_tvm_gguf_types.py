"""Blocks of GGUF types against decoders that share nothing with the reader's code."""

import gguf
import gguf_blocks
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Packaged

from bitmtp_tvm.checkpoint import gguf_types as types

KINDS = {
    "Q1_0": types.Q1_0,
    "Q2_0": types.Q2_0,
    "Q2_0 wide": types.Q2_0_WIDE,
    "PQ2_0": types.PQ2_0,
    "TQ1_0": types.TQ1_0,
    "TQ2_0": types.TQ2_0,
    "I2_S": types.I2_S,
}
COLUMNS = 768


def random_rows(name, seed=0, rows=5):
    """Blocks of any bytes whatever, but for their scales, which are finite and all different."""
    _, group, size = gguf_blocks.TYPES[name]
    random = np.random.default_rng(seed)
    blocks = random.integers(0, 256, (rows, COLUMNS // group, size), np.uint8)
    scales = random.permutation(blocks.shape[0] * blocks.shape[1]).astype(np.float16) - 7
    place = slice(0, 2) if name.startswith(("Q", "P")) else slice(size - 2, size)
    if name != "I2_S":
        blocks[..., place] = scales.reshape(*blocks.shape[:2], 1).view(np.uint8)
    return blocks.reshape(rows, -1)


@pytest.mark.parametrize("name", KINDS)
def test_any_bytes_mean_what_the_table_says(name):
    rows = random_rows(name)
    data = rows.tobytes()
    if name == "I2_S":
        data += np.array([0.375], "<f4").tobytes() + bytes(28)
    expected = gguf_blocks.decode(name, data, COLUMNS)
    np.testing.assert_array_equal(types.dequantise(KINDS[name], rows, 0.375), expected)
    if name == "I2_S":
        weights = (types.split_i2_s(rows).astype(np.float32) - 1) * np.float32(0.375)
    else:
        codes, scales = types.split(KINDS[name], rows)
        signs = codes.astype(np.float32) * (2 if name == "Q1_0" else 1) - 1
        weights = signs * np.repeat(scales.astype(np.float32), KINDS[name].group, axis=1)
        assert scales.dtype == np.float16 and codes.dtype == np.uint8
    np.testing.assert_array_equal(weights, expected)


@pytest.mark.parametrize("name", ["TQ1_0", "TQ2_0"])
def test_the_package_says_the_same(name):
    rows = random_rows(name, seed=1)
    expected = gguf.dequantize(rows, Packaged[name])
    np.testing.assert_array_equal(types.dequantise(KINDS[name], rows), expected)
    np.testing.assert_array_equal(
        gguf_blocks.decode(name, rows.tobytes(), COLUMNS).reshape(expected.shape), expected
    )


@pytest.mark.parametrize("name", KINDS)
def test_encoded_blocks_are_decoded(name):
    """The encoders, which the other tests write their files with, against the scalar decoders."""
    random = np.random.default_rng(2)
    _, group, _ = gguf_blocks.TYPES[name]
    codes = random.integers(0, 2 if name == "Q1_0" else 3, (3, COLUMNS)).astype(np.uint8)
    scales = random.permutation(codes.size // group).reshape(3, -1) / np.float16(64)
    if name == "I2_S":
        scales = np.float32(0.7)
    data = gguf_blocks.encode(name, codes, scales)
    spread = scales if name == "I2_S" else np.repeat(scales.astype(np.float32), group, axis=1)
    signs = codes.astype(np.float32) * (2 if name == "Q1_0" else 1) - 1
    np.testing.assert_array_equal(gguf_blocks.decode(name, data, COLUMNS), signs * spread)


def test_worked_example_of_q2_0():
    block = np.zeros((1, 18), np.uint8)
    block[0, :4] = [0x00, 0x3C, 0x24, 0x25]  # a scale of 1, then the eight codes of the docstring
    codes, scales = types.split(types.Q2_0, block)
    assert codes[0, :8].tolist() == [0, 1, 2, 0, 1, 1, 2, 0] and scales.tolist() == [[1.0]]


def test_every_type_that_the_package_dequantises_is_read():
    random = np.random.default_rng(3)
    seen = set()
    for kind in Packaged:
        found = types.tensor_types(int(kind))
        if not found or kind.name in KINDS:
            continue
        (known,) = found
        group, size = gguf.GGML_QUANT_SIZES[kind]
        assert (known.name, known.group, known.bytes) == (kind.name, group, size)
        rows = random.integers(0, 64, (2, 3 * size), np.uint8)
        expected = gguf.dequantize(rows.view(np.float16) if kind is Packaged.F16 else rows, kind)
        if kind is Packaged.F32:
            expected = rows.view(np.float32)
        np.testing.assert_array_equal(types.dequantise(known, rows), expected)
        seen.add(kind.name)
    assert seen >= {"F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"}
    assert seen >= {"Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS"}


@pytest.mark.parametrize("number", [4, 26, 28, 37, 38, 99, 143, 1000, 2**32 - 1])
def test_all_other_numbers_are_unknown(number):
    assert types.tensor_types(number) == ()
    assert str(number) in types.type_name(number)


def test_two_types_share_a_number():
    assert types.tensor_types(42) == (types.Q2_0, types.Q2_0_WIDE)
