import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relax_models.formats import (
    FORMATS,
    LAYOUTS,
    bf16_bits,
    bf16_to_float32,
    locate,
    pack,
    packed_dtype,
    packed_shape,
    padded_k,
    unpack,
)

SHAPES = [(1, 1), (7, 127), (8, 128), (9, 129), (17, 200), (24, 1408), (33, 2560), (5, 6912)]
EIGHT = np.array([[0, 1, 2, 0, 1, 1, 2, 0]], np.uint8)


def random_codes(n, k, seed=0):
    return np.random.default_rng(seed).integers(0, 3, (n, k)).astype(np.uint8)


def scalar_unpack(packed, n, k, kind):
    """One element at a time, straight from the description of the layouts."""
    if kind == "cuda":
        tile, in_tile = divmod(n, 16)
        chunk, rest = divmod(k, 128)
        rowhalf, g = divmod(in_tile, 8)
        t, rest = divmod(rest, 32)
        s, rest = divmod(rest, 8)
        khalf, b = divmod(rest, 4)
        word = int(packed[tile, chunk, 4 * g + t, 2 * khalf + rowhalf])
        return word >> (8 * b + 2 * s) & 3
    tile, r = divmod(n, 8)
    block, rest = divmod(k, 128)
    j, rest = divmod(rest, 16)
    s, b = divmod(rest, 4)
    return int(packed[tile, block, j, 4 * r + b]) >> (2 * s) & 3


@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_unpack_inverts_pack(kind, n, k):
    codes = random_codes(n, k)
    packed = pack(codes, kind)
    assert packed.shape == packed_shape(kind, n, k)
    assert packed.dtype == packed_dtype(kind)
    assert packed.flags.c_contiguous
    np.testing.assert_array_equal(unpack(packed, n, k, kind), codes)


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(sorted(LAYOUTS)), st.integers(1, 70), st.integers(1, 400), st.integers(0, 99)
)
def test_unpack_inverts_pack_for_any_shape(kind, n, k, seed):
    codes = random_codes(n, k, seed)
    np.testing.assert_array_equal(unpack(pack(codes, kind), n, k, kind), codes)


@pytest.mark.parametrize("kind", LAYOUTS)
def test_every_bit_is_where_the_description_says(kind):
    codes = random_codes(19, 300)
    packed = pack(codes, kind)
    for n, k in np.ndindex(codes.shape):
        assert scalar_unpack(packed, n, k, kind) == codes[n, k]
        index, shift = locate(kind, n, k)
        assert int(packed[index]) >> shift & 3 == codes[n, k]


@pytest.mark.parametrize("kind", LAYOUTS)
def test_padding_is_weight_zero(kind):
    n, k = 3, 130
    packed = pack(np.full((n, k), 2, np.uint8), kind)
    rows, columns = packed.shape[0] * LAYOUTS[kind].row_tile, padded_k(k)
    full = unpack(packed, rows, columns, kind)
    assert np.all(full[:n, :k] == 2)
    assert np.all(full[n:] == 1) and np.all(full[:, k:] == 1)


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


def test_pack_takes_any_memory_order():
    codes = random_codes(40, 260)
    for kind in LAYOUTS:
        wanted = pack(codes, kind)
        np.testing.assert_array_equal(pack(np.asfortranarray(codes), kind), wanted)
        np.testing.assert_array_equal(pack(codes[::-1][::-1], kind), wanted)


@pytest.mark.parametrize(
    "codes",
    [
        np.array([[0, 3]], np.uint8),
        np.zeros((2, 2), np.int8),
        np.zeros(4, np.uint8),
        np.zeros((0, 4), np.uint8),
    ],
)
def test_pack_refuses_what_are_no_codes(codes):
    with pytest.raises(ValueError, match="codes"):
        pack(codes, "cuda")


def test_unknown_kinds_and_wrong_shapes_are_named():
    with pytest.raises(ValueError, match=r"'metal'; known: cuda, llvm"):
        packed_shape("metal", 1, 1)
    with pytest.raises(ValueError, match="expected uint8"):
        unpack(pack(EIGHT, "cuda"), 1, 8, "llvm")


def test_formats_are_named_by_their_key():
    assert all(name == entry.name for name, entry in FORMATS.items())
    assert all(kind == entry.kind for kind, entry in LAYOUTS.items())


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
