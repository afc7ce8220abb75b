"""The GPU's choice of tokens: that its kernels compile as they should, and what they say against
the numpy twin. The tests marked `gpu` need TVM's runtime alone where `--kernels` names a library.
"""

import re
from dataclasses import replace

import gpu_kernels
import numpy as np
import pytest
from choose_cases import OPTIONS, check, damaged, random_case, state_for
from gpu_kernels import CHOOSE_ROWS, VOCABULARIES, kernel, nothing

from bitmtp_tvm import reference
from bitmtp_tvm.sampling import SamplingOptions
from relax_models.state import Word

ARCHES = ("sm_86", "sm_87", "sm_90a")
# As relax_models.choose_ops has it: a machine that runs kernels need not have the compiler.
PART = 256
REAL = [
    kernel(op, vocab, rows=rows)
    for op in ("softmax_parts", "choose")
    for vocab, rows in [(128256, 1), (128256, 8), (151669, 8), (8192, 64)]
]


@pytest.fixture(scope="module")
def source():
    return gpu_kernels.cuda_text(REAL, gpu_kernels.target_for("sm_86"))


def test_the_part_of_these_tests_is_the_operation_s():
    from relax_models import choose_ops

    assert choose_ops.PART == PART


@pytest.mark.parametrize("arch", ARCHES)
def test_kernels_compile_without_spills(source, arch):
    from bitmtp_tvm.cubin import find_cubins
    from bitmtp_tvm.nvrtc import compile_cubin

    cubin, _ = compile_cubin(source, arch)
    (found,) = find_cubins(cubin)
    assert len(found.kernels) == len(REAL)
    assert {k.name: k.stack_bytes for k in found.kernels if k.stack_bytes} == {}
    assert max(k.shared_bytes for k in found.kernels) <= 256
    # A block of 32 warps has no more than 64 registers a thread.
    assert max(k.registers for k in found.kernels) <= 64


def test_nothing_is_left_to_the_compiler_s_taste(source):
    """Exponentials and logarithms are the accurate ones, and no kernel of parts has a barrier."""
    assert not re.search(r"\b__(expf|logf|fdividef)\(", source)
    bodies = re.split(r'^extern "C" __global__ ', source, flags=re.MULTILINE)
    parts = [body for body in bodies if re.search(r" softmax_parts\w+\([^)]*\) \{", body)]
    assert len(parts) == 4
    for body in parts:
        assert "__syncthreads" not in body and "__shared__" not in body
        assert ("*(float4*)(logits_ptr" in body) != ("151669" in body)


# ---- on the device ----


def choice_of(kernels, case):
    """Token, confidence and logprob."""
    rows, vocab = case.logits.shape
    parts = -(-vocab // PART)
    results = [nothing(rows, parts), np.full((rows, parts), 77, np.int32), nothing(rows, parts)]
    item = kernel("softmax_parts", vocab, rows=rows)
    made = kernels.run(item, [*case.arguments, *results])[-3:]
    chosen = [np.full(rows, 77, np.int32), nothing(rows), nothing(rows)]
    item = kernel("choose", vocab, rows=rows)
    return kernels.run(item, [*case.arguments, *made, *chosen])[-3:]


@pytest.mark.gpu
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_a_choice_is_the_twin_s(kernels, rng, vocab, name):
    differing = 0
    for _ in range(3):
        case = random_case(rng, 8, vocab, OPTIONS[name], 6)
        differing += check(case, *choice_of(kernels, case))
        case = damaged(rng, case)
        chosen = choice_of(kernels, case)
        differing += check(case, *chosen)
        assert chosen[0][:4].tolist() == [-1] * 4
        assert not chosen[1][:4].any() and not chosen[2][:4].any()
    assert differing <= 1


@pytest.mark.gpu
@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_parts_are_the_twin_s(kernels, rng, vocab):
    options = SamplingOptions(repetition_penalty=1.3)
    case = damaged(rng, random_case(rng, 8, vocab, options, 6))
    case.logits[4, :PART] = -np.inf
    parts = -(-vocab // PART)
    results = [nothing(8, parts), np.full((8, parts), 77, np.int32), nothing(8, parts)]
    item = kernel("softmax_parts", vocab, rows=8)
    top, best, total = kernels.run(item, [*case.arguments, *results])[-3:]
    want = reference.softmax_parts(*case.arguments, PART)
    asks = case.logit_rows >= 0
    assert np.array_equal(top[asks], want[0][asks]) and np.array_equal(best[asks], want[1][asks])
    np.testing.assert_allclose(total[asks], want[2][asks], rtol=1e-5)
    assert np.isnan(top[3]).all() and (best[3] == 77).all() and np.isnan(total[3]).all()


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["greedy", "temperature", "hot", "everything"])
@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_a_row_s_choice_is_the_same_in_every_bucket(kernels, rng, vocab, name):
    """Bit for bit, in every row, beside rows that are no numbers."""
    most = max(CHOOSE_ROWS)
    case = random_case(rng, most, vocab, OPTIONS[name], most)
    together = choice_of(kernels, case)
    for rows in CHOOSE_ROWS[:-1]:
        for first in range(0, most - rows + 1, 9):
            alone = choice_of(kernels, case.rows(slice(first, first + rows)))
            for a, b in zip(alone, together, strict=True):
                assert np.array_equal(a, b[first : first + rows])
    case.logits[1::2] = np.nan
    for a, b in zip(choice_of(kernels, case), together, strict=True):
        assert np.array_equal(a[::2], b[::2])


@pytest.mark.gpu
def test_flat_rows_and_long_searches(kernels, rng):
    """Equal logits, neighbours in float32, and filters whose edge is far from the maximum."""
    vocab = 128256
    case = random_case(rng, 8, vocab, SamplingOptions(1.0), 8)
    case.logits[0] = 0
    case.logits[1] = 1 + np.arange(vocab) * np.float32(2**-23)
    case.logits[2] = np.float32(1e30) * rng.random(vocab)
    case.logits[3] = -np.float32(1e-30) * rng.random(vocab)
    case.logits[4] = np.arange(vocab) * np.float32(1e-3)
    for options in (
        SamplingOptions(1.0, top_k=1000),
        SamplingOptions(1.0, top_k=128000),
        SamplingOptions(2.0, top_p=0.5),
        SamplingOptions(1000.0, top_k=50, top_p=0.5),
    ):
        state = state_for(options, 8, seed=5)
        assert state[Word.ROW_DRAFTS] == 7
        check(replace(case, state=state), *choice_of(kernels, replace(case, state=state)))
