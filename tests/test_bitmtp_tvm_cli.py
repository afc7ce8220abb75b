"""How every command ends: faults, signals, and streams that cannot be written."""

import os
import signal
import subprocess
import sys

import pytest

from bitmtp_tvm.cli import run
from bitmtp_tvm.errors import BitMTPError, UsageError


def failing(fault):
    def work():
        raise fault

    return work


@pytest.mark.parametrize(
    ("fault", "code", "line"),
    [
        (BitMTPError("the file\nis short"), 1, "error: the file is short\n"),
        (UsageError("no such target"), 2, "error: no such target\n"),
        (OSError(28, "No space left on device"), 1, "error: [Errno 28] No space left on device\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
        (BrokenPipeError(), 1, ""),
    ],
)
def test_a_fault_is_one_line_and_a_code(capsys, fault, code, line):
    assert run(failing(fault)) == code
    assert capsys.readouterr().err == line


def test_a_fault_of_the_program_itself_is_not_hidden():
    with pytest.raises(ZeroDivisionError):
        run(lambda: 1 // 0)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("foreign", [False, True])
def test_a_signal_ends_in_its_own_code(capsys, number, foreign):
    """Also where foreign code on the stack makes another exception of it."""

    def work():
        try:
            os.kill(os.getpid(), number)
        except KeyboardInterrupt as fault:
            raise (RuntimeError("lost in translation") if foreign else fault) from None

    before = signal.getsignal(number)
    assert run(work) == 128 + number
    assert capsys.readouterr().err == "interrupted\n"
    assert signal.getsignal(number) == before


def child(text, **streams):
    code = f"import sys; from bitmtp_tvm.cli import run; sys.exit(run(lambda: {text}))"
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"}
    return subprocess.run([sys.executable, "-c", code], env=environment, check=False, **streams)


def test_a_full_disk_behind_stdout_is_one_line():
    with open("/dev/full", "w") as full:
        done = child("print('answer')", stdout=full, stderr=subprocess.PIPE)
    assert done.returncode == 1
    assert done.stderr == b"error: [Errno 28] No space left on device\n"


def test_a_reader_that_went_away_is_silence():
    source, sink = os.pipe()
    os.close(source)
    done = child("print('answer' * 9999)", stdout=sink, stderr=subprocess.PIPE)
    os.close(sink)
    assert (done.returncode, done.stderr) == (1, b"")


def test_with_stderr_closed_nothing_lands_on_stdout():
    options = ["--prompt-ids", "1", "--json", "--artifact", "nowhere"]
    command = [sys.executable, "-m", "bitmtp_tvm.generate", *options]
    shell = ["sh", "-c", 'exec "$@" 2>&-', "sh", *command]
    done = subprocess.run(shell, stdout=subprocess.PIPE, check=False)
    assert done.stdout == b""


def test_a_character_that_stdout_cannot_show_is_no_fault():
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    code = "from bitmtp_tvm.cli import run; raise SystemExit(run(lambda: print('d\\u00e9')))"
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, b"d?\n")
