"""The processor of an aarch64 machine: compiled for here, and run here by qemu-user.

Its answers are those of this machine's processor bit for bit, not within a tolerance: every sum has
a fixed tree, and where a product and a sum are fused is fixed as well.
"""

import json
import os
import platform
import shutil
import subprocess
from pathlib import Path

import pytest
from bitnet_checkpoint import ODD, write_checkpoint
from greedy_trace import load, record
from imports import ROOT

from bitmtp_tvm import Engine, elf
from bitmtp_tvm.artifact import open_artifact
from bitmtp_tvm.compile import CompileOptions, compile_model
from bitmtp_tvm.errors import BitMTPError

NEW_TOKENS = 24
# The last one is longer than the widest decode bucket: it goes through prefill.
TEXTS = [
    "def fibonacci(n):",
    "import numpy as",
    "class Stack:\n    def __init__(self",
    '"""Read a file of comma-separated values."""\n\nimport csv\n\n\ndef read(path, names=None):\n'
    '    """Yield one dictionary a row."""\n    with open(path) as file:\n',
]


class Emulated:
    """Another kind of machine: `qemu`, and the folder that `aarch64_root.py` made."""

    def __init__(self, qemu: str, root: Path) -> None:
        self.command = [qemu, "-L", root, root / "usr" / "bin" / "python3"]
        self.environment = {"PYTHONPATH": os.pathsep.join([str(root / "site"), str(ROOT)])}

    def python(self, *arguments: str | Path) -> str:
        """stdout of its Python."""
        done = subprocess.run(
            [*self.command, *arguments],
            cwd=ROOT,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=900,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout


@pytest.fixture(scope="module")
def emulated(request):
    if platform.machine() != "x86_64":
        pytest.skip("compares with an x86-64 processor")
    qemu = request.config.getoption("--qemu")
    qemu = qemu or shutil.which("qemu-aarch64-static") or shutil.which("qemu-aarch64")
    if qemu is None:
        pytest.skip("needs qemu-user: install it, or give --qemu PATH")
    root = request.config.getoption("--aarch64-root")
    if root is None:
        pytest.skip("needs --aarch64-root DIR, made by `python tests/aarch64_root.py DIR`")
    return Emulated(qemu, Path(root).absolute())


@pytest.fixture(scope="module")
def demos(tmp_path_factory):
    """Folders of the demo for this machine's processor and for an aarch64 one."""
    folder = tmp_path_factory.mktemp("demo")
    for target in ("cpu", "cpu-aarch64"):
        options = CompileOptions(target, context=256, widths=(1,), output=folder / target)
        compile_model(options)
    return folder / "cpu", folder / "cpu-aarch64"


def test_an_aarch64_artifact_is_made_anywhere_and_runs_only_there(tmp_path, monkeypatch):
    write_checkpoint(tmp_path / "odd", ODD)
    folder = tmp_path / "artifact"
    made = CompileOptions("cpu-aarch64", str(tmp_path / "odd"), widths=(1,), output=folder)
    manifest = compile_model(made)
    assert elf.parse((folder / "model.so").read_bytes()).machine == "aarch64"
    assert manifest.host_features == ("asimd", "asimddp") and manifest.kind == "llvm"
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    with pytest.raises(BitMTPError, match=r"for aarch64 hosts \(target cpu-aarch64\)"):
        open_artifact(folder)


@pytest.mark.slow
def test_the_demo_answers_on_aarch64_as_it_does_here(emulated, demos, tmp_path):
    here, there = demos
    (tmp_path / "texts").write_text("".join(f"{json.dumps(text)}\n" for text in TEXTS))
    asked = ["--prompts", tmp_path / "texts", "--max-new-tokens", str(NEW_TOKENS), "--json"]
    shown = emulated.python("-m", "bitmtp_tvm.generate", "--artifact", there, *asked)
    theirs = [json.loads(line) for line in shown.splitlines()]
    print("tokens per second:", *(answer["stats"]["tokens_per_second"] for answer in theirs))
    engine = Engine(here)
    ours = [engine.generate(text, NEW_TOKENS).result() for text in TEXTS]
    assert [answer["token_ids"] for answer in theirs] == [list(a.token_ids) for a in ours]
    assert [answer["text"] for answer in theirs] == [answer.text for answer in ours]


@pytest.mark.slow
def test_the_demos_logits_on_aarch64_are_those_of_here(emulated, demos, tmp_path):
    here, there = demos
    engine = Engine(here)
    prompts = [engine.encode(text) for text in TEXTS]
    (tmp_path / "prompts").write_text(json.dumps(prompts))
    program, trace = ROOT / "tests" / "greedy_trace.py", tmp_path / "trace"
    emulated.python(program, "record", there, tmp_path / "prompts", trace, str(NEW_TOKENS))
    assert json.loads(trace.read_text()) == record(load(here), prompts, NEW_TOKENS)
