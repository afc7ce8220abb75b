"""Ternary linears on the GPU's tensor cores: that they compile as they should, and their tiles.

What they compute is compared with the numpy twin in tests/test_schedules_gpu.py, at every width.
"""

import re
from dataclasses import astuple, replace
from itertools import product

import gpu_kernels
import pytest
from gpu_kernels import linear

ARCHES = ("sm_86", "sm_87", "sm_90a")
# Of BitNet-2B; the widths between those that the tests of all operations compile.
REAL = [
    linear(segments, size, residual, width)
    for (segments, size, residual), width in product(
        [
            ((2560, 640, 640), 2560, False),
            ((2560,), 2560, True),
            ((6912, 6912), 2560, False),
            ((2560,), 6912, True),
        ],
        (4, 16, 32, 64),
    )
]


@pytest.fixture(scope="module")
def source():
    return gpu_kernels.cuda_text(REAL, gpu_kernels.target_for("sm_86"))


@pytest.mark.parametrize("arch", ARCHES)
def test_kernels_compile_without_spills(source, arch):
    from bitmtp_tvm.cubin import find_cubins
    from bitmtp_tvm.nvrtc import compile_cubin

    cubin, _ = compile_cubin(source, arch)
    (found,) = find_cubins(cubin)
    assert len(found.kernels) == len(REAL)
    assert {k.name: k.stack_bytes for k in found.kernels if k.stack_bytes} == {}
    assert max(k.shared_bytes for k in found.kernels) <= 48 * 1024
    # Three blocks of four warps, or one of a dozen.
    assert max(k.registers for k in found.kernels) <= 168


def test_every_product_is_one_of_the_tensor_cores(source):
    bodies = re.split(r'^extern "C" __global__ ', source, flags=re.MULTILINE)
    kernels = [body for body in bodies if re.search(r" low_bit_linear\w+\([^)]*\) \{", body)]
    assert len(kernels) == len(REAL)
    for text in kernels:
        assert "mma_int_sync_aligned_m16n8k32" in text and "__dp4a" not in text


def test_one_row_is_left_to_dp4a():
    for width in (1, 2, 3, 4):
        item = linear((64,), 256, False, width)
        text = gpu_kernels.cuda_text([item], gpu_kernels.target_for("sm_86"))
        assert ("__dp4a(" in text.split("__global__")[-1]) == (width < 2)


WIDTHS = (1, 3, 4, 8, 9, 16, 24, 32, 33, 64, 65, 130, 2048)


@pytest.mark.parametrize("width", WIDTHS)
def test_the_rule_has_a_tile_for_any_shape(width):
    from schedules.gpu.low_bit_mma_tile import choose_tile, problem

    tiles, blocks, cards = (1, 9, 160, 864, 9480), (1, 2, 4, 11, 20, 54, 127, 172), (4, 16, 132)
    for n, k, multiprocessors in product(tiles, blocks, cards):
        tile = choose_tile(width, n, k, multiprocessors)
        assert problem(tile, k) == ""
        assert tile.warps <= 20 and tile.token_tiles <= min(4, -(-width // 8))
        # No block but the last has nothing but clamped rows.
        groups = -(-width // tile.tokens)
        assert (groups - 1) * tile.tokens < width


# Warps, row tiles and teams that were the fastest on an H200, of the shapes of REAL.
FASTEST = {
    1: [(10, 1, 1), (10, 1, 1), (5, 2, 2), (18, 1, 1)],
    8: [(20, 2, 1), (10, 1, 1), (5, 2, 1), (18, 1, 1)],
    16: [(20, 2, 1), (20, 2, 1), (4, 4, 1), (9, 1, 1)],
    32: [(20, 2, 1), (20, 2, 1), (5, 2, 2), (9, 2, 1)],
}


@pytest.mark.parametrize("width", FASTEST)
def test_candidates_are_many_and_the_fastest_known_among_them(width):
    from schedules.gpu import TEMPLATES
    from schedules.space import LARGE_CARD, choices
    from schedules.workload import read

    for item, fastest in zip(REAL[::4], FASTEST[width], strict=True):
        work = read(gpu_kernels.definition(replace(item, dims=(("width", width),))))
        found = choices(TEMPLATES["low_bit_linear"], work, LARGE_CARD)
        tiles = [c.tile for c in found if c.template.name.startswith("low_bit_mma")]
        assert 20 <= len(tiles) == len(set(tiles)) <= 100
        known = [t for t in tiles if (t.warps, t.row_tiles, t.teams) == fastest]
        assert any(tile.token_tiles == -(-width // 8) for tile in known)
        assert found[0].template.name == ("low_bit_gemv" if width < 3 else "low_bit_mma")


def test_a_tile_that_does_not_fit_is_refused():
    from bitmtp_tvm.targets import tvm_target
    from schedules.gpu.low_bit_mma import TEMPLATE
    from schedules.workload import read

    target = tvm_target(gpu_kernels.target_for("sm_90a"))
    work = read(gpu_kernels.definition(linear((64,), 512, False, 8)))
    fitting = {"warps": 2, "teams": 2, "row_tiles": 1, "token_tiles": 1, "ahead": 2}
    fitting |= {"x_ahead": 2, "chains": 4, "resident": 1}
    assert TEMPLATE.make(work, TEMPLATE.tile(**fitting), target)
    for wrong in (
        {"warps": 5},
        {"warps": 0},
        {"teams": 32},
        {"ahead": 3},
        {"x_ahead": 3},
        {"chains": 2},
        {"resident": 16},
        {"row_tiles": 4, "token_tiles": 8},
        {"row_tiles": 4, "token_tiles": 4, "resident": 4},
    ):
        with pytest.raises(ValueError, match="MmaTile"):
            TEMPLATE.make(work, TEMPLATE.tile(**(fitting | wrong)), target)


EARLIER = re.compile(r"griddepcontrol_launch_dependents\(\);(.*?)\w+griddepcontrol_wait\(\);", re.S)


def test_only_weights_and_their_scales_are_read_before_the_wait():
    """Of kernels that wait by themselves, of rules and of other tiles."""
    items = [*REAL[:4:2], *list(gpu_kernels.tiled_linears())[::2]]
    text = gpu_kernels.cuda_text(items, gpu_kernels.target_for("sm_90a"))
    bodies = re.split(r'^extern "C" __global__ ', text, flags=re.MULTILINE)
    kernels = [body for body in bodies[1:] if "mma_int_sync" in body]
    assert len(kernels) == sum("mma" in (i.tile or ("mma",))[0] for i in items)
    for body in kernels:
        (early,) = EARLIER.findall(body)
        assert re.search("ld_vec_weak|cp_async", early)
        assert not re.search(r"\b(q|scale|total|residual|y)_ptr", early)
        assert not re.search(r"(weight|weight_scale)_ptr\[", early.replace("(&(weight", "("))


@pytest.mark.parametrize("width", (128, 256, 512))
def test_tiles_for_many_rows_fit_and_the_rule_takes_one_where_they_fill_the_card(width):
    from schedules.gpu import TEMPLATES
    from schedules.gpu.low_bit_mma_wide_tile import problem
    from schedules.space import LARGE_CARD, choices
    from schedules.workload import read

    for item in REAL[::4]:
        work = read(gpu_kernels.definition(replace(item, dims=(("width", width),))))
        found = choices(TEMPLATES["low_bit_linear"], work, LARGE_CARD)
        tiles = [c.tile for c in found if c.template.name.startswith("low_bit_mma_wide")]
        assert 20 <= len(tiles) == len(set(tiles)) <= 81
        assert not any(problem(tile) for tile in tiles)
        filled = width == 512 or (width == 256 and sum(item.arguments[0]) > 2560)
        assert (found[0].template.name == "low_bit_mma_wide") == filled


def test_the_shapes_of_the_rule_for_many_rows_have_no_spills():
    """The largest that the rule gives each shape, with as many blocks as it may ask for."""
    from bitmtp_tvm.cubin import find_cubins
    from bitmtp_tvm.nvrtc import compile_cubin
    from schedules.gpu.low_bit_mma_wide_tile import SHAPES, WideTile, problem

    tiles = [
        max(
            (t for n in (1, 2, 3) if not problem(t := WideTile(*s, 3, n))), key=lambda t: t.resident
        )
        for s in SHAPES
    ]
    item = linear((2560,), 6912, True, 512)
    items = [replace(item, tile=("low_bit_mma_wide", *astuple(tile))) for tile in tiles]
    text = gpu_kernels.cuda_text(items, gpu_kernels.target_for("sm_86"))
    for arch in ARCHES:
        (found,) = find_cubins(compile_cubin(text, arch)[0])
        assert {k.name: k.stack_bytes for k in found.kernels} == {k.name: 0 for k in found.kernels}
        assert len(found.kernels) == len(SHAPES)
