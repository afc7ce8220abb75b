"""Options of the test run."""


def pytest_addoption(parser):
    parser.addoption(
        "--kernels", help="folder that `python tests/gpu_kernels.py build` filled, for -m gpu"
    )
