import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

import bitmtp_tvm
from bitmtp_tvm import demo
from bitmtp_tvm.errors import BitMTPError

ROOT = Path(bitmtp_tvm.__file__).parents[1]

# Stands in for the interpreter that runs the compiler: $1 $2 are "-m bitmtp_tvm.compile".
COMPILER = """\
#!/bin/sh
echo "$@" >> "$CALLS"
echo phase one
for directory; do :; done
mkdir "$directory.part" && sleep 0.3 && echo whole > "$directory.part/model.so"
mv "$directory.part" "$directory"
"""
FAILING = """\
#!/bin/sh
echo "error: no linker" >&2
exit 1
"""


@pytest.fixture
def compiler(tmp_path, monkeypatch):
    def install(script):
        program = tmp_path / "python"
        program.write_text(script)
        program.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(program))
        return program

    monkeypatch.setenv("BITMTP_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    return install


def test_first_use_compiles_and_the_next_does_not(compiler, tmp_path, capfd):
    compiler(COMPILER)
    directory = demo.demo_artifact()
    assert (directory / "model.so").read_text() == "whole\n"
    assert directory.parent == tmp_path / "cache" and demo.demo_artifact() == directory
    calls = (tmp_path / "calls").read_text().splitlines()
    assert calls == [f"-m bitmtp_tvm.compile --target cpu -o {directory}"]
    out, err = capfd.readouterr()
    assert out == "" and "phase one" in err and str(directory) in err


def test_a_failing_compiler_is_shown_and_gives_one_sentence(compiler, capfd):
    compiler(FAILING)
    with pytest.raises(BitMTPError, match=r"could not be compiled, .*\.\[compile\]"):
        demo.demo_artifact()
    assert "error: no linker" in capfd.readouterr().err


def test_two_first_uses_at_once_compile_once(compiler, tmp_path):
    real = sys.executable
    program = compiler(COMPILER)
    code = f"""
        import sys
        sys.executable = {str(program)!r}
        from bitmtp_tvm.demo import demo_artifact
        print((demo_artifact() / "model.so").read_text(), end="")
    """
    users = [
        subprocess.Popen(
            [real, "-c", textwrap.dedent(code)],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for _ in range(3)
    ]
    for user in users:
        assert user.communicate(timeout=30)[0] == b"whole\n" and user.returncode == 0
    assert len((tmp_path / "calls").read_text().splitlines()) == 1


def test_ctrl_c_while_compiling_leaves_nothing_running(compiler, tmp_path):
    real = sys.executable
    program = compiler('#!/bin/sh\necho $$ > "$CALLS"\nexec sleep 60\n')
    code = f"import sys; sys.executable = {str(program)!r}; from bitmtp_tvm import cli, demo; "
    code += "sys.exit(cli.run(demo.demo_artifact))"
    with subprocess.Popen(
        [real, "-c", code],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stderr=subprocess.PIPE,
        start_new_session=True,
    ) as user:
        calls = tmp_path / "calls"
        while not (calls.exists() and calls.read_text()):
            time.sleep(0.02)
        os.killpg(user.pid, signal.SIGINT)
        err = user.communicate(timeout=20)[1]
    assert user.returncode == 130 and err.endswith(b"interrupted\n") and b"Traceback" not in err
    with pytest.raises(ProcessLookupError):
        os.kill(int(calls.read_text()), 0)


def test_the_key_follows_the_source_and_the_machine(monkeypatch, tmp_path):
    key = demo.cache_key()
    assert key == demo.cache_key() and demo.platform.machine() in key
    package = tmp_path / "bitmtp_tvm"
    package.mkdir()
    monkeypatch.setattr(demo, "__file__", str(package / "demo.py"))
    (package / "session.py").write_text("one")
    before = demo.cache_key()
    (package / "session.py").write_text("two")
    assert len({key, before, demo.cache_key()}) == 3
