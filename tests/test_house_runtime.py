"""A compiled model runs where TVM has no compiler."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from imports import ROOT

from bitmtp_tvm.compile import CompileOptions, compile_model
from bitmtp_tvm.libraries import tvm_library_directory

COMPILER_LIBRARY = "libtvm_compiler.so"

# tvm.relax is what a program with a compiler has in any case, and one without cannot have.
PROGRAM = """
import sys
from bitmtp_tvm import Engine
result = Engine(sys.argv[1]).generate("def f(", max_new_tokens=4).result()
assert len(result.token_ids) == 4 and result.text
import tvm
assert tvm.base._RUNTIME_ONLY
compiler = ("tvm.relax", "relax_models", "schedules")
allowed = ("relax_models", "relax_models.state")
loaded = [name for name in sys.modules if name.startswith(compiler) and name not in allowed]
assert not loaded, loaded
"""


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """The demo for this machine's processor, of one width and a short context."""
    directory = tmp_path_factory.mktemp("artifact") / "demo"
    compile_model(CompileOptions("cpu", widths=(1,), context=64, output=directory))
    return directory


def test_tvm_may_be_told_to_leave_its_compiler_out(demo):
    run(demo, TVM_USE_RUNTIME_LIB="1")


def test_the_compiler_library_may_be_missing(demo, tmp_path):
    folder = without_compiler(tmp_path)
    run(demo, PYTHONPATH=os.pathsep.join([str(folder), str(ROOT)]))


def run(directory: Path, **environment: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, directory],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def without_compiler(folder: Path) -> Path:
    """A site folder whose `tvm` is the installed one, file by file, but for its compiler."""
    installed = tvm_library_directory()
    assert (installed / COMPILER_LIBRARY).exists()
    copy = folder / "tvm" / "lib"
    copy.mkdir(parents=True)
    for path in installed.parent.iterdir():
        if path.name not in ("lib", "lib64"):
            (folder / "tvm" / path.name).symlink_to(path)
    for path in installed.iterdir():
        if path.name != COMPILER_LIBRARY:
            (copy / path.name).symlink_to(path)
    return folder
