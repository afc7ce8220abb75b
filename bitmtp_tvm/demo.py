"""The demo model for this machine's CPU, compiled into the cache on first use."""

import fcntl
import hashlib
import platform
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from bitmtp_tvm.cache import cache_directory
from bitmtp_tvm.errors import BitMTPError


def demo_artifact(verbose: bool = False) -> Path:
    """The directory of the demo artifact for `cpu`; what is missing is compiled by a child.

    The child's messages go to stderr. Raises `BitMTPError` when it fails or the cache directory
    cannot be written.
    """
    cache = cache_directory()
    directory = cache / cache_key()
    if not directory.is_dir():
        # Two first uses at once: the second waits, and then finds the work done.
        with locked(cache / f"{directory.name}.lock"):
            if not directory.is_dir():
                compile_demo(directory, verbose)
    return directory


def cache_key() -> str:
    """Names what the artifact depends on: package, TVM, machine.

    The package's own files are part of it, so that a checkout under work never runs an old program.
    """
    parts = [installed("bitmtp-tvm"), "tvm", installed("apache-tvm"), platform.machine()]
    return "-".join(["demo-cpu", *parts, source_digest()])


def installed(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:  # run from a checkout
        return "none"


def source_digest() -> str:
    """Eight hexadecimal digits over the Python files of the three packages."""
    root = Path(__file__).resolve().parents[1]
    digest = hashlib.sha256()
    for package in ("bitmtp_tvm", "relax_models", "schedules"):
        for path in sorted((root / package).rglob("*.py")):
            digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:8]


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold `path` as a lock between processes; it ends with the process, whatever kills it."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("waiting for another process that compiles the demo model", file=sys.stderr)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def compile_demo(directory: Path, verbose: bool) -> None:
    """Run the compiler as a child: this process then needs, and loads, nothing of it."""
    print(f"compiling the demo model for this machine into {directory}", file=sys.stderr)
    sys.stderr.flush()
    command = [sys.executable, "-m", "bitmtp_tvm.compile", "--target", "cpu", "-o", str(directory)]
    if verbose:
        command.append("--verbose")
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=2)
    try:
        code = child.wait()
    except BaseException:
        end(child)
        raise
    if code or not directory.is_dir():
        raise BitMTPError(
            "the demo model could not be compiled, for the reason above: if the compiler is "
            "missing, `pip install -e '.[compile]'` in the checkout of this package brings it, and "
            "--artifact takes a model that was compiled elsewhere"
        )


def end(child: "subprocess.Popen[bytes]") -> None:
    """Let a child that Ctrl-C reached as well remove its half-written files, then insist."""
    try:
        child.wait(timeout=5)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        child.terminate()
        child.wait()
