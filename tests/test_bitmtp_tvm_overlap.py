"""Kernels that start early: what is done to their text and to their launches."""

import re

import gpu_kernels
import pytest

from bitmtp_tvm.overlap import overlaps, with_waits

TEXT = """\
__forceinline__ __device__ void helper() {
  asm volatile("griddepcontrol.wait;" :  :  : "memory");
}
extern "C" __global__ void __launch_bounds__(8) plain_kernel(float* __restrict__ x_ptr);
extern "C" __global__ void __launch_bounds__(8) plain_kernel(float* __restrict__ x_ptr) {
  x_ptr[0] = 1.0f;
}

extern "C" __global__ void own_kernel(float* __restrict__ x_ptr, int n) {
  griddepcontrol_wait();
}
"""


def test_only_new_cards_know_such_launches():
    assert [overlaps(arch) for arch in ("sm_86", "sm_87", "sm_89", "sm_90a", "sm_100")] == [
        False,
        False,
        False,
        True,
        True,
    ]


def test_a_kernel_waits_before_anything_else_unless_it_does_so_itself():
    lines = with_waits(TEXT).splitlines()
    at = next(i for i, line in enumerate(lines) if line.endswith("plain_kernel(float* x_ptr) {"))
    assert lines[at + 1].strip() == 'asm volatile("griddepcontrol.launch_dependents;");'
    assert lines[at + 2].strip() == 'asm volatile("griddepcontrol.wait;" ::: "memory");'
    own = next(i for i, line in enumerate(lines) if " own_kernel(" in line)
    assert lines[own + 1] == "  griddepcontrol_wait();"
    assert len(lines) == len(TEXT.splitlines()) + 2


def test_no_pointer_is_taken_for_constant():
    """Or its loads may come before the wait."""
    assert "__restrict__" not in with_waits(TEXT)


@pytest.mark.parametrize(("arch", "early"), [("sm_90a", True), ("sm_86", False)])
def test_a_linear_asks_for_its_weights_before_it_waits(arch, early):
    source = gpu_kernels.cuda_text(
        [gpu_kernels.linear((256,), 256, False, 1)], gpu_kernels.target_for(arch)
    )
    body = source[source.rindex('extern "C"') :]
    assert ("griddepcontrol" in body) == early
    if early:
        before, after = body.split("griddepcontrol_wait", 1)
        assert "weight_ptr" in before and "q_ptr +" not in before
        assert "q_ptr +" in after


@pytest.mark.parametrize("shape", [gpu_kernels.FUSED_LINEARS[5], gpu_kernels.FUSED_LINEARS[10]])
def test_a_fused_linear_asks_for_constants_before_it_waits_and_for_nothing_else(shape):
    source = gpu_kernels.cuda_text(
        [gpu_kernels.fused_linear(*shape, 2)], gpu_kernels.target_for("sm_90a")
    )
    before, after = source[source.rindex('extern "C"') :].split("griddepcontrol_wait", 1)
    asked = set(re.findall(r"\b(\w+)_ptr (?:\+|\[)|\b(\w+)_ptr\[", before.partition("{")[2]))
    asked = {name for pair in asked for name in pair if name}
    assert {"weight", "norm"} <= asked
    assert not asked & {"x", "residual", "y"}
    assert "x_ptr" in after
