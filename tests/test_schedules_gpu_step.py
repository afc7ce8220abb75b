"""The GPU's kernels of the decode step: that they compile as they should, and that they do what the
oracle says. The tests marked `gpu` need TVM's runtime alone where `--kernels` names a library.
"""

import gpu_kernels
import pytest
from fake_model import VOCAB
from gpu_kernels import STEP_VOCABULARY, STEP_WIDTHS, kernel
from step_kernels import WIDTHS, KernelOps
from step_properties import StepProperties
from step_stops import StopProperties

ARCHES = ("sm_86", "sm_87", "sm_90a")
REAL = [
    item
    for width in (1, 16, 64)
    for item in (kernel("step_rows", width=width), kernel("accept", 128256, rows=width))
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


def test_the_kernels_are_built_for_the_fake_model():
    assert STEP_VOCABULARY == VOCAB and STEP_WIDTHS == WIDTHS


@pytest.fixture(scope="module")
def ops(kernels):
    def call(name, width, arrays):
        if name == "step_rows":
            return kernels.run(kernel(name, width=width), arrays)
        return kernels.run(kernel(name, VOCAB, rows=width), arrays)

    # So few tokens are one part.
    return KernelOps(call, parts=1)


@pytest.mark.gpu
class TestKernels(StepProperties, StopProperties):
    pass
