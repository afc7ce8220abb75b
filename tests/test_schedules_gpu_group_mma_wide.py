"""Linears with group scales for many activation rows: which tiles there are, that their kernels
compile as they should, and, on a device, that their bits are those of a step's kernels."""

from dataclasses import astuple, replace
from itertools import product

import gpu_kernels
import numpy as np
import pytest
from gpu_kernels import (
    GROUP_FORMATS,
    GROUP_PROMPTS,
    PROMPT_ROWS,
    STEP_ROWS,
    group_linear,
    normal,
    nothing,
)
from test_schedules_gpu_groups import random_weights, summed_by_the_tree

from bitmtp_tvm import reference

ARCHES = ("sm_86", "sm_87", "sm_90a")
WIDE = "low_bit_group_mma_wide"
# The smallest multiprocessor that there are targets for gives all blocks of it this much.
SHARED_BYTES = 99 * 1024
SAMPLED = 40


def workload(shape, form, width):
    from schedules.workload import read

    return read(gpu_kernels.definition(group_linear(*shape, form, width)))


@pytest.mark.parametrize("form", GROUP_FORMATS)
def test_every_tile_of_the_rule_compiles_without_spills(form):
    """With as many blocks as the rule may ask for, which leaves the fewest registers."""
    from bitmtp_tvm.cubin import find_cubins
    from bitmtp_tvm.nvrtc import compile_cubin
    from schedules.gpu.low_bit_group_mma_wide_tile import of_the_rule, stage_bytes
    from schedules.gpu.packed import GROUP_PACKINGS

    packing = GROUP_PACKINGS[form]
    tiles = {astuple(t)[:4]: t for t in of_the_rule(packing)}.values()
    item = group_linear(*GROUP_PROMPTS[3], form, 512)
    items = [replace(item, tile=(WIDE, *astuple(tile))) for tile in tiles]
    text = gpu_kernels.cuda_text(items, gpu_kernels.target_for("sm_86"))
    for arch in ARCHES:
        (found,) = find_cubins(compile_cubin(text, arch)[0])
        kernels = {k.name.removesuffix("_kernel"): k for k in found.kernels}
        assert {name: k.stack_bytes for name, k in kernels.items() if k.stack_bytes} == {}
        for tile, made in zip(tiles, items, strict=True):
            shared = kernels[made.name].shared_bytes
            assert shared == tile.stages * stage_bytes(tile, packing)
            # A block also takes a kilobyte of the system's.
            assert tile.resident * (shared + 1024) <= SHARED_BYTES


@pytest.mark.parametrize("form", GROUP_FORMATS)
def test_the_rule_takes_wide_tiles_from_128_rows_on(form):
    from schedules.gpu import TEMPLATES
    from schedules.gpu.low_bit_group_mma_wide_tile import packing_of, problem
    from schedules.space import LARGE_CARD, choices

    for shape, width in product(GROUP_PROMPTS, (64, 65, 127, *PROMPT_ROWS)):
        work = workload(shape, form, width)
        found = choices(TEMPLATES["low_bit_linear"], work, LARGE_CARD)
        tiles = [c.tile for c in found if c.template.name.startswith(WIDE)]
        assert not any(problem(tile, packing_of(work)) for tile in tiles)
        assert len(tiles) == len(set(tiles)) and (len(tiles) >= 20) == (width >= 65)
        assert (found[0].template.name == WIDE) == (width >= 128)
    # A block or two of many groups is left to where K is split.
    assert (
        choices(TEMPLATES["low_bit_linear"], workload(((40,), 9728, False), form, 130), LARGE_CARD)[
            0
        ].template.name
        == "low_bit_group_mma"
    )


def test_a_tile_that_does_not_fit_is_refused():
    from bitmtp_tvm.targets import tvm_target
    from schedules.gpu.low_bit_group_mma_wide import TEMPLATE

    target = tvm_target(gpu_kernels.target_for("sm_90a"))
    work = workload(((64,), 512, False), "ternary-g128", 200)
    fitting = {"row_warps": 2, "token_warps": 2, "row_tiles": 2, "token_tiles": 3}
    fitting |= {"stages": 3, "resident": 2}
    assert TEMPLATE.make(work, TEMPLATE.tile(**fitting), target)
    for wrong in (
        {"row_warps": 0},
        {"stages": 1},
        {"stages": 5},
        {"resident": 16},
        {"resident": 3},
        {"token_tiles": 4},
        {"token_warps": 8},
    ):
        with pytest.raises(ValueError, match="GroupWideTile"):
            TEMPLATE.make(work, TEMPLATE.tile(**(fitting | wrong)), target)


@pytest.mark.gpu
@pytest.mark.parametrize("form", GROUP_FORMATS)
@pytest.mark.parametrize("shape", GROUP_PROMPTS)
def test_a_row_of_a_prompt_is_that_of_a_step(kernels, rng, shape, form):
    """Against the twin for some weight rows, and in all of them against a step's kernel."""
    segments, size, residual = shape
    rows, bits, most = sum(segments), GROUP_FORMATS[form], max(PROMPT_ROWS)
    codes, scales, packed = random_weights(rng, rows, size, bits)
    q, scale, total = reference.quantize_groups(normal(rng, most, size) * 3 + 1)
    q[1], total[1] = -128, -128 * gpu_kernels.GROUP
    added = normal(rng, most, rows)
    some = np.sort(rng.choice(rows, SAMPLED, replace=False))
    want = summed_by_the_tree(q, scale, total, codes[some], scales[some], bits)
    want = want + added[:, some] if residual else want

    def run(width, step):
        arguments = [q[step], scale[step], total[step], *packed]
        arguments += [added[step]] if residual else []
        item = group_linear(*shape, form, width)
        return kernels.run(item, [*arguments, nothing(width, rows)])[-1]

    results = {width: run(width, slice(width)) for width in PROMPT_ROWS}
    for width, got in results.items():
        np.testing.assert_array_equal(got[:, some], want[:width])
    for first in range(0, most, 72):
        of_step = run(STEP_ROWS, slice(first, first + STEP_ROWS))
        for width, got in results.items():
            part = got[first : first + STEP_ROWS]
            assert np.array_equal(part.view(np.uint32), of_step[: len(part)].view(np.uint32)), width
