"""Options of the test run, and what the tests of GPU kernels share."""

import gpu_kernels
import numpy as np
import pytest


def pytest_addoption(parser):
    parser.addoption(
        "--kernels", help="folder that `python tests/gpu_kernels.py build` filled, for -m gpu"
    )
    parser.addoption("--artifact", help="the demo compiled for the GPU at hand, for -m gpu")
    parser.addoption(
        "--tuning", help="folder that `tune --build-only` made for the GPU at hand, for -m gpu"
    )
    parser.addoption(
        "--aarch64-root", help="folder that `python tests/aarch64_root.py` made, for -m slow"
    )
    parser.addoption("--qemu", help="user-mode emulator of aarch64 (default: the one on PATH)")


@pytest.fixture(scope="session")
def kernels(request, tmp_path_factory):
    """The library that `--kernels` names, else one built here for the device at hand."""
    folder = request.config.getoption("--kernels")
    if folder is None:
        from bitmtp_tvm.device import read_device

        major, minor = read_device().compute_capability
        arch = "sm_90a" if (major, minor) == (9, 0) else f"sm_{major}{minor}"
        folder = tmp_path_factory.mktemp("kernels")
        gpu_kernels.build(folder, arch)
    return gpu_kernels.Kernels(gpu_kernels.Path(folder) / gpu_kernels.LIBRARY)


@pytest.fixture
def rng():
    return np.random.default_rng(7)
