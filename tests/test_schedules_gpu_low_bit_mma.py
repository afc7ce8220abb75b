"""Ternary linears on the GPU's tensor cores: that they compile as they should, and their tiles.

What they compute is compared with the numpy twin in tests/test_schedules_gpu.py, at every width.
"""

import re
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


def test_two_rows_and_fewer_are_left_to_dp4a():
    for width in (1, 2, 3, 4):
        item = linear((64,), 256, False, width)
        text = gpu_kernels.cuda_text([item], gpu_kernels.target_for("sm_86"))
        assert ("__dp4a(" in text.split("__global__")[-1]) == (width < 3)


WIDTHS = (3, 4, 8, 9, 16, 24, 32, 33, 64, 65, 130, 2048)


@pytest.mark.parametrize("width", WIDTHS)
def test_tiles_fit_any_shape(width):
    from schedules.gpu.low_bit_mma import _summed_at_once, choose_tile

    for tiles, blocks in product((1, 9, 160, 864, 9480), (1, 2, 4, 11, 20, 54, 127, 172)):
        tile = choose_tile(width, tiles, blocks, 132)
        turns = -(-blocks // tile.warps)
        assert 1 <= tile.warps <= min(20, blocks) and 1 <= tile.ahead <= turns
        assert tile.token_tiles <= min(4, -(-width // 8))
        # No block but the last has nothing but clamped rows.
        groups = -(-width // (8 * tile.token_tiles))
        assert (groups - 1) * 8 * tile.token_tiles < width
        at_once = _summed_at_once(tile)
        assert tile.token_tiles % at_once == 0
        assert at_once * tile.row_tiles * tile.warps * 512 <= 48 * 1024
        assert tile.sums <= 64
