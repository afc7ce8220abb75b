import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relax_models.formats import (
    FORMATS,
    KINDS,
    LAYOUTS,
    PADDING_CODE,
    bf16_bits,
    bf16_to_float32,
    get_format,
    locate,
    pack,
    pack_scales,
    packed_dtype,
    packed_shape,
    padded_k,
    row_tile,
    scales_shape,
    unpack,
    unpack_scales,
)

SHAPES = [(1, 1), (7, 127), (8, 128), (9, 129), (17, 200), (24, 1408), (33, 2560), (5, 6912)]
EIGHT = np.array([[0, 1, 2, 0, 1, 1, 2, 0]], np.uint8)
EIGHT_BINARY = np.array([[0, 1, 1, 0, 1, 1, 0, 0]], np.uint8)
ALL = pytest.mark.parametrize(("kind", "bits"), sorted(LAYOUTS))


def random_codes(n, k, bits, seed=0):
    return np.random.default_rng(seed).integers(0, bits + 1, (n, k)).astype(np.uint8)


def scalar_unpack(packed, n, k, kind, bits):
    """One element at a time, straight from the description of the layouts."""
    chunk, rest = divmod(k, 128)
    if kind == "cuda":
        t, in_lane = divmod(rest, 32)
        s, in_step = divmod(in_lane, 8)
        khalf, b = divmod(in_step, 4)
        if bits == 1:
            tile, in_tile = divmod(n, 32)
            i, g = divmod(in_tile, 8)
            return int(packed[tile, chunk, 4 * g + t, i]) >> (8 * b + 2 * s + khalf) & 1
        tile, in_tile = divmod(n, 16)
        rowhalf, g = divmod(in_tile, 8)
        word = int(packed[tile, chunk, 4 * g + t, 2 * khalf + rowhalf])
        return word >> (8 * b + 2 * s) & 3
    tile, r = divmod(n, 8)
    j, in_word = divmod(rest, 32 if bits == 1 else 16)
    s, b = divmod(in_word, 4)
    return int(packed[tile, chunk, j, 4 * r + b]) >> (bits * s) & (1 if bits == 1 else 3)


@ALL
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_unpack_inverts_pack(kind, bits, n, k):
    codes = random_codes(n, k, bits)
    packed = pack(codes, kind, bits)
    assert packed.shape == packed_shape(kind, n, k, bits)
    assert packed.dtype == packed_dtype(kind)
    assert packed.flags.c_contiguous
    assert packed.nbytes == packed.shape[0] * row_tile(kind, bits) * padded_k(k) * bits // 8
    np.testing.assert_array_equal(unpack(packed, n, k, kind, bits), codes)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(sorted(LAYOUTS)), st.integers(1, 70), st.integers(1, 400), st.integers(0, 99)
)
def test_unpack_inverts_pack_for_any_shape(layout, n, k, seed):
    kind, bits = layout
    codes = random_codes(n, k, bits, seed)
    np.testing.assert_array_equal(unpack(pack(codes, kind, bits), n, k, kind, bits), codes)


@ALL
def test_every_bit_is_where_the_description_says(kind, bits):
    codes = random_codes(37, 300, bits)
    packed = pack(codes, kind, bits)
    for n, k in np.ndindex(codes.shape):
        assert scalar_unpack(packed, n, k, kind, bits) == codes[n, k]
        index, shift = locate(kind, n, k, bits)
        assert int(packed[index]) >> shift & (1 if bits == 1 else 3) == codes[n, k]


@ALL
def test_padding_is_the_padding_code(kind, bits):
    n, k = 3, 130
    packed = pack(np.full((n, k), bits, np.uint8), kind, bits)
    rows, columns = packed.shape[0] * row_tile(kind, bits), padded_k(k)
    full = unpack(packed, rows, columns, kind, bits)
    assert np.all(full[:n, :k] == bits)
    assert np.all(full[n:] == PADDING_CODE[bits]) and np.all(full[:, k:] == PADDING_CODE[bits])


def test_worked_example_cuda():
    packed = pack(EIGHT, "cuda")
    assert packed.shape == (1, 1, 32, 4)
    assert packed[0, 0, 0].tolist() == [0x54565554, 0x55555555, 0x54565555, 0x55555555]
    assert np.all(packed[0, 0, 1:] == 0x55555555)


def test_worked_example_llvm():
    packed = pack(EIGHT, "llvm")
    assert packed.shape == (1, 1, 8, 32)
    assert packed.reshape(-1)[:4].tolist() == [0x54, 0x55, 0x5A, 0x50]
    assert np.all(packed.reshape(-1)[4:] == 0x55)


def test_worked_examples_of_one_bit():
    packed = pack(EIGHT_BINARY, "cuda", 1)
    assert packed.shape == (1, 1, 32, 4)
    assert packed[0, 0, 0].tolist() == [0x00010302, 0, 0, 0] and not packed[0, 0, 1:].any()
    packed = pack(EIGHT_BINARY, "llvm", 1)
    assert packed.shape == (1, 1, 4, 32)
    assert packed.reshape(-1)[:4].tolist() == [2, 3, 1, 0] and not packed.reshape(-1)[4:].any()


@ALL
def test_pack_takes_any_memory_order(kind, bits):
    codes = random_codes(40, 260, bits)
    wanted = pack(codes, kind, bits)
    np.testing.assert_array_equal(pack(np.asfortranarray(codes), kind, bits), wanted)
    np.testing.assert_array_equal(pack(codes[::-1][::-1], kind, bits), wanted)


@ALL
@pytest.mark.parametrize("n", [1, 8, 33])
def test_unpack_scales_inverts_pack_scales(kind, bits, n):
    scales = np.arange(1, n * 3 + 1).reshape(n, 3).astype(np.float16)
    packed = pack_scales(scales, kind, bits)
    assert packed.shape == scales_shape(kind, n, 384, bits) == scales_shape(kind, n, 257, bits)
    assert packed.dtype == np.float16 and packed.flags.c_contiguous
    tile = row_tile(kind, bits)
    for row, group in np.ndindex(scales.shape):
        assert packed[row // tile, group, row % tile] == scales[row, group]
    assert np.count_nonzero(packed) == scales.size
    np.testing.assert_array_equal(unpack_scales(packed, n, 384, kind, bits), scales)


def test_worked_example_of_scales():
    packed = pack_scales(np.array([[1, 2], [3, 4], [5, 6]], np.float16), "llvm")
    assert packed.reshape(-1).tolist() == [1, 3, 5, 0, 0, 0, 0, 0, 2, 4, 6, 0, 0, 0, 0, 0]


@pytest.mark.parametrize(
    ("codes", "bits"),
    [
        (np.array([[0, 3]], np.uint8), 2),
        (np.array([[0, 2]], np.uint8), 1),
        (np.zeros((2, 2), np.int8), 2),
        (np.zeros(4, np.uint8), 2),
        (np.zeros((0, 4), np.uint8), 1),
    ],
)
def test_pack_refuses_what_are_no_codes(codes, bits):
    with pytest.raises(ValueError, match="codes"):
        pack(codes, "cuda", bits)


def test_unknown_kinds_and_wrong_shapes_are_named():
    with pytest.raises(ValueError, match=r"'metal'; known: cuda, llvm"):
        packed_shape("metal", 1, 1)
    with pytest.raises(ValueError, match=r"3 bits; known: 1, 2"):
        packed_shape("cuda", 1, 1, 3)
    with pytest.raises(ValueError, match=r"'int4'; known: bitnet-ternary, ternary-g128, binary"):
        get_format("int4")
    with pytest.raises(ValueError, match="expected uint8"):
        unpack(pack(EIGHT, "cuda"), 1, 8, "llvm")
    with pytest.raises(ValueError, match="float16 matrix of scales"):
        pack_scales(np.ones((2, 2), np.float32), "cuda")
    with pytest.raises(ValueError, match=r"expected float16 \(1, 2, 8\)"):
        unpack_scales(np.ones((1, 2, 16), np.float16), 3, 256, "llvm")


def test_formats_are_named_by_their_key():
    assert all(name == entry.name for name, entry in FORMATS.items())
    assert all(key == (entry.kind, entry.bits) for key, entry in LAYOUTS.items())
    assert {(kind, entry.bits) for kind in KINDS for entry in FORMATS.values()} == set(LAYOUTS)


def test_bf16_rounds_to_nearest_even():
    one_and = np.array([0x3F808000, 0x3F818000, 0x3F808001, 0x3F807FFF], np.uint32)
    assert bf16_bits(one_and.view(np.float32)).tolist() == [0x3F80, 0x3F82, 0x3F81, 0x3F80]
    special = np.array([np.inf, -np.inf, 0.0, -0.0, 3.4e38], np.float32)
    assert bf16_bits(special).tolist() == [0x7F80, 0xFF80, 0, 0x8000, 0x7F80]
    nans = np.array([0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001], np.uint32).view(np.float32)
    assert np.isnan(bf16_to_float32(bf16_bits(nans))).all()


def test_bf16_round_trip_is_exact():
    bits = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16)
    bits = bits[~np.isnan(bf16_to_float32(bits))].reshape(2, -1)
    np.testing.assert_array_equal(bf16_bits(bf16_to_float32(bits)), bits)
