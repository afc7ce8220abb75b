"""The tensor-core kernels of formats with group scales: which there are, and that they compile as
they should. What they compute, test_schedules_gpu_groups.py compares on the device."""

from itertools import product

import gpu_kernels
import pytest
from gpu_kernels import GROUP_FORMATS, group_linear, group_warps

ARCHES = ("sm_86", "sm_87", "sm_90a")
# Many rows, many groups, and 12 warps; N is ragged in the first. More rows of x are those of
# test_schedules_gpu_group_mma_wide.py.
SHAPES = [(151669, 2048), (2560, 9728), (2048, 6144)]
WIDTHS = (3, 8, 16, 64)
REAL = [
    group_linear((n,), k, n == 2560, form, width)
    for (n, k), form, width in product(SHAPES, GROUP_FORMATS, WIDTHS)
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
    assert max(k.shared_bytes for k in found.kernels) <= 20 * 1024


def test_an_mma_is_used_from_two_rows_on():
    form, target = "ternary-g128", gpu_kernels.target_for("sm_86")
    for width in (1, 2, 3, 130):
        text = gpu_kernels.cuda_text([group_linear((40,), 512, False, form, width)], target)
        body = text.split("__global__")[-1]
        assert ("mma_int_sync_aligned_m16n8k32" in body) == (width >= 2)
        assert ("__dp4a(" in body) == (width < 2)


def test_tiles_fit_any_shape_and_the_sum_hangs_on_the_groups_alone():
    from schedules.gpu.low_bit_group_mma_tile import MOST_TILES, choose_tile
    from schedules.gpu.packed import GROUP_PACKINGS

    widths, tiles, groups = (3, 8, 9, 16, 24, 64, 2048), (1, 128, 9480), (1, 3, 20, 76, 96, 300)
    for packing, width, n, g in product(GROUP_PACKINGS.values(), widths, tiles, groups):
        tile = choose_tile(width, n, g, packing, 132)
        assert tile.warps == group_warps(g) <= 16
        assert 1 <= tile.row_tiles * packing.rows // 2 * tile.token_tiles <= MOST_TILES
        turns = tile.warps * tile.ahead
        assert turns * -(-g // turns) - g < turns and tile.ahead <= 4
