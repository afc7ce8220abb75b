"""The directory that compiling makes and running opens: written whole, checked before use."""

import ctypes
import hashlib
import importlib.metadata
import os
import platform
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bitmtp_tvm import elf
from bitmtp_tvm.device import DRIVER_CUDA, DeviceFacts, cpu_features, read_device, read_host
from bitmtp_tvm.errors import BitMTPError, UsageError
from bitmtp_tvm.libraries import import_tvm, load_tvm_cuda
from bitmtp_tvm.manifest import Manifest, Shard, embedded_manifest
from bitmtp_tvm.targets import parse_arch

LIBRARY = "model.so"
MANIFEST = "manifest.json"
# What compile writes, and what `bench --steps` adds: nothing else is ever replaced.
OWN_FILES = re.compile(
    r"manifest\.json|model\.so|params-\d{5}\.safetensors|tokenizer\.json|chat_template\.jinja"
    r"|t_w\.json"
)
MACHINE_NAMES = {"arm64": "aarch64", "AMD64": "x86_64"}


@dataclass(frozen=True)
class Artifact:
    """A checked artifact: its directory and what its manifest says."""

    directory: Path
    manifest: Manifest

    @property
    def library(self) -> Path:
        return self.directory / LIBRARY

    @property
    def tokenizer(self) -> Path | None:
        name = self.manifest.tokenizer.file
        return self.directory / name if name else None

    @property
    def chat_template(self) -> Path | None:
        name = self.manifest.tokenizer.chat_template
        return self.directory / name if name else None


def open_artifact(directory: Path) -> Artifact:
    """Check everything that needs no device, before anything is allocated.

    In this order, each fault a `BitMTPError` of one sentence: manifest and library are there; the
    manifest is readable and equals the copy inside the library; the library is whole and for this
    kind of machine; the processor has the features it needs; TVM has the version that it was built
    with; the parameters, the tokenizer and the chat template are there, with their sizes.
    """
    manifest = _read_manifest(directory)
    artifact = Artifact(directory, manifest)
    _check_machine(artifact)
    _check_features(artifact, cpu_features())
    _check_tvm(artifact, tvm_version())
    _check_files(artifact)
    return artifact


def _read_manifest(directory: Path) -> Manifest:
    if not directory.is_dir():
        raise BitMTPError(f"{directory} is not there: give the folder that compile wrote")
    for name in (MANIFEST, LIBRARY):
        if not (directory / name).is_file():
            raise BitMTPError(f"{directory} is no artifact: {name} is missing, compile it again")
    path = directory / MANIFEST
    try:
        text = path.read_bytes().decode()
        manifest = Manifest.from_json(text)
    except (OSError, ValueError, RecursionError) as fault:
        raise BitMTPError(f"{path} is damaged ({fault}): compile the artifact again") from fault
    if text != embedded_manifest(directory / LIBRARY):
        raise BitMTPError(
            f"{path} differs from the copy inside {LIBRARY}: one of them was changed, compile the "
            "artifact again"
        )
    return manifest


def _check_files(artifact: Artifact) -> None:
    sizes = {shard.file: shard.bytes for shard in artifact.manifest.shards}
    text = artifact.manifest.tokenizer
    names = [*sizes, text.file, text.chat_template]
    for name in filter(None, names):
        path = artifact.directory / name
        if not path.is_file():
            raise BitMTPError(f"{path} is missing: copy the whole artifact, or compile it again")
        size = path.stat().st_size
        if size != sizes.get(name, size):
            raise BitMTPError(
                f"{path} has {size} bytes instead of {sizes[name]}: copy the whole artifact, or "
                "compile it again"
            )


def _check_machine(artifact: Artifact) -> None:
    try:
        machine = elf.parse(artifact.library.read_bytes()).machine
    except elf.ElfError as fault:
        raise BitMTPError(f"{artifact.library} is damaged ({fault}): compile it again") from fault
    here = MACHINE_NAMES.get(platform.machine(), platform.machine())
    if machine != here:
        raise BitMTPError(
            f"{artifact.directory} is for {machine} hosts (target {artifact.manifest.target}), but "
            f"this machine is {here}: run it there, or compile for a target with this host"
        )


def _check_features(artifact: Artifact, present: frozenset[str]) -> None:
    missing = sorted(set(artifact.manifest.host_features) - present)
    if missing:
        raise BitMTPError(
            f"{artifact.directory} needs a processor with {', '.join(missing)}, which this one has "
            "not: run it on a newer machine"
        )


def tvm_version() -> str:
    """The version of the installed TVM, without importing it where its records tell."""
    try:
        return importlib.metadata.version("apache-tvm")
    except importlib.metadata.PackageNotFoundError:
        import_tvm()
        import tvm

        return str(tvm.__version__)


def _release(version: str) -> str:
    """The part of a version that the format of compiled code hangs on: no `.post1`, no `+local`."""
    found = re.match(r"\d+(\.\d+)*", version)
    return found.group() if found else version


def _check_tvm(artifact: Artifact, installed: str) -> None:
    wanted = artifact.manifest.versions.get("tvm", "")
    if _release(installed) != _release(wanted):
        raise BitMTPError(
            f"{artifact.directory} was compiled with TVM {wanted}, but TVM {installed} is "
            f"installed: pip install apache-tvm=={wanted}, or compile it again"
        )


def check_device(artifact: Artifact, facts: DeviceFacts | None = None) -> DeviceFacts:
    """Make sure that the device can run the artifact, before anything is allocated on it.

    `facts` are read from the machine when not given. In this order, each fault a `BitMTPError`: the
    device exists, its compute capability, its driver, its free memory.
    """
    manifest = artifact.manifest
    if manifest.kind == "cuda":
        facts = facts or read_device()
        _check_capability(artifact, facts)
        _check_driver(artifact, facts)
    facts = facts or read_host()
    needed = manifest.memory.total
    if needed > facts.free:
        raise BitMTPError(
            f"{artifact.directory} needs {needed / 2**20:.0f} MiB at a context of "
            f"{manifest.context}, but {facts.name} has {facts.free / 2**20:.0f} MiB free: compile "
            "with a smaller --context, or free memory"
        )
    return facts


def _check_capability(artifact: Artifact, facts: DeviceFacts) -> None:
    arch = artifact.manifest.arch
    if facts.compute_capability != parse_arch(arch):
        found = ".".join(map(str, facts.compute_capability or ()))
        raise BitMTPError(
            f"{artifact.directory} was compiled for {arch} (target {artifact.manifest.target}), "
            f"but {facts.name} has compute capability {found}: compile for a --target of that kind"
        )


def _check_driver(artifact: Artifact, facts: DeviceFacts) -> None:
    least = artifact.manifest.least_drivers
    wanted = {"its machine code": least.get("machine_code", 0)}
    # A TVM built from source against an older CUDA (JetPack 6) does not have the wheel's need.
    if facts.cudart >= DRIVER_CUDA[580] // 1000:
        wanted["the CUDA runtime in TVM's wheel"] = least.get("runtime", 0)
    for what, branch in wanted.items():
        cuda = DRIVER_CUDA.get(branch, 0)
        if facts.driver < cuda:
            raise BitMTPError(
                f"{artifact.directory} cannot run here: {what} needs driver {branch} (CUDA "
                f"{_version(cuda)}) or newer, but this driver has CUDA {_version(facts.driver)}: "
                "update the driver"
            )


def _version(cuda: int) -> str:
    return f"{cuda // 1000}.{cuda % 1000 // 10}"


def load_library(artifact: Artifact) -> Any:
    """Load the library into TVM's runtime, with what it needs around it; returns the module.

    A GPU artifact needs the device's own driver here. Raises `BitMTPError` when TVM refuses.
    """
    if artifact.manifest.kind == "cuda":
        load_tvm_cuda()
    import_tvm()
    import tvm

    # The library names no dependencies: what it calls must be visible in the process.
    ctypes.CDLL("libm.so.6", ctypes.RTLD_GLOBAL)
    try:
        return tvm.runtime.load_module(str(artifact.library))
    except (RuntimeError, OSError) as fault:
        raise BitMTPError(f"TVM cannot load {artifact.library}: {fault}") from fault


def read_parameters(
    directory: Path, shards: tuple[Shard, ...], verify: bool = True
) -> Iterator[tuple[str, Any]]:
    """Name and array of the packed parameters, shard by shard, one array in memory at a time.

    With `verify`, each file is first compared with its SHA-256. Raises `BitMTPError` for a file
    that differs or cannot be read.
    """
    from safetensors import SafetensorError, safe_open

    for shard in shards:
        path = directory / shard.file
        try:
            if verify and _sha256(path) != shard.sha256:
                raise BitMTPError(f"{path} was changed or damaged: compile the artifact again")
            with safe_open(path, framework="numpy") as tensors:
                for name in tensors.offset_keys():
                    yield name, tensors.get_tensor(name)
        except (OSError, SafetensorError) as fault:
            raise BitMTPError(f"{path} cannot be read: {fault}") from fault


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


@contextmanager
def write_artifact(directory: Path) -> Iterator[Path]:
    """A folder to write an artifact into; it becomes `directory` when the block ends well.

    Until then `directory` is untouched; when the block fails nothing remains. An artifact that is
    already there is replaced, behind a symbolic link too; anything else there is a `UsageError` at
    once.
    """
    if directory.is_symlink():
        directory = directory.resolve()
    _check_replaceable(directory)
    parent = directory.absolute().parent
    try:
        parent.mkdir(parents=True, exist_ok=True)
        holder = Path(tempfile.mkdtemp(prefix=f".{directory.name}-", dir=parent))
    except OSError as fault:
        raise BitMTPError(f"cannot write beside {directory}: {fault.strerror}") from fault
    try:
        folder = holder / "new"
        folder.mkdir()
        yield folder
        _read_manifest(folder)
        _swap(folder, directory, holder / "old")
    except OSError as fault:
        raise BitMTPError(f"cannot write {directory}: {fault}") from fault
    finally:
        shutil.rmtree(holder, ignore_errors=True)


def _check_replaceable(directory: Path) -> None:
    if directory.name == "..":
        raise UsageError(f"{directory} has no name of its own: choose another -o")
    if not os.path.lexists(directory):
        return
    if not directory.is_dir():
        raise UsageError(f"{directory} exists and is no folder: choose another -o")
    if directory.resolve() == Path.cwd():
        raise UsageError(f"{directory} is the current folder: choose another -o")
    names = {path.name for path in directory.iterdir()}
    foreign = sorted(name for name in names if not OWN_FILES.fullmatch(name))
    if foreign:
        raise UsageError(
            f"{directory} exists and holds {foreign[0]}, so it is no artifact: choose another -o, "
            "or remove it"
        )
    if names and not {MANIFEST, LIBRARY} <= names:
        raise UsageError(f"{directory} exists and is no artifact: choose another -o, or remove it")


def _swap(new: Path, directory: Path, old: Path) -> None:
    # Once more: somebody may have put something there while the artifact was made.
    _check_replaceable(directory)
    if directory.exists():
        os.rename(directory, old)
    try:
        os.rename(new, directory)
    except OSError:
        if old.exists():
            os.rename(old, directory)
        raise
