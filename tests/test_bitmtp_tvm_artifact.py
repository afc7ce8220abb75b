import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tiny_artifact import PARAMETERS, manifest_for, write_tiny

from bitmtp_tvm import artifact as stage
from bitmtp_tvm.artifact import (
    Artifact,
    check_device,
    load_library,
    open_artifact,
    read_parameters,
    write_artifact,
)
from bitmtp_tvm.cli import run
from bitmtp_tvm.device import DeviceFacts
from bitmtp_tvm.errors import BitMTPError, UsageError
from bitmtp_tvm.targets import get_target

H200 = DeviceFacts((9, 0), 13000, 141 << 30, 140 << 30, "NVIDIA H200")
SHARD = "params-00001.safetensors"


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("artifacts")
    return {name: write_tiny(folder / name, name) for name in ("cpu", "orin", "h200")}


@pytest.fixture
def copy(made, tmp_path):
    """A copy of an artifact, to be spoilt."""

    def make(name: str = "cpu") -> Path:
        shutil.copytree(made[name], tmp_path / name)
        return tmp_path / name

    return make


def refusal(directory: Path, capsys) -> str:
    """What the user sees: one line on stderr, exit code 1."""
    assert run(lambda: check_device(open_artifact(directory)) and None) == 1
    shown = capsys.readouterr().err
    assert shown.startswith("error: ") and shown.count("\n") == 1
    return shown


def test_a_good_artifact_opens_loads_and_gives_its_parameters(made) -> None:
    import tvm
    import tvm.runtime.vm

    found = open_artifact(made["cpu"])
    assert found.manifest.target == "cpu" and found.tokenizer is None
    assert check_device(found).free > found.manifest.memory.total
    machine = tvm.runtime.vm.VirtualMachine(load_library(found), tvm.cpu())
    x = np.ones(16, np.float32)
    np.testing.assert_allclose(machine["main"](tvm.runtime.tensor(x)).numpy(), np.e, rtol=1e-3)
    tensors = dict(read_parameters(found.directory, found.manifest.shards))
    assert tensors.keys() == PARAMETERS.keys()
    for name, tensor in tensors.items():
        assert tensor.dtype == PARAMETERS[name].dtype
        np.testing.assert_array_equal(tensor, PARAMETERS[name])


def test_no_such_folder_and_no_artifact(tmp_path: Path, capsys) -> None:
    assert "is not there" in refusal(tmp_path / "none", capsys)
    assert "is no artifact: manifest.json is missing" in refusal(tmp_path, capsys)


@pytest.mark.parametrize("name", ["manifest.json", "model.so", SHARD])
def test_a_missing_file(name: str, copy, capsys) -> None:
    directory = copy()
    (directory / name).unlink()
    assert f"{name} is missing" in refusal(directory, capsys)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("manifest.json", "manifest.json is damaged"),
        ("model.so", "model.so"),
        (SHARD, f"{SHARD} has "),
    ],
)
@pytest.mark.parametrize("keep", [0.0, 0.5, 0.98])
def test_a_truncated_file(name: str, message: str, keep: float, copy, capsys) -> None:
    directory = copy()
    contents = (directory / name).read_bytes()
    (directory / name).write_bytes(contents[: int(len(contents) * keep)])
    assert message in refusal(directory, capsys)


def test_a_changed_manifest(copy, capsys) -> None:
    directory = copy("orin")
    data = json.loads((directory / "manifest.json").read_text())
    data["context"] += 1
    (directory / "manifest.json").write_text(json.dumps(data, indent=1, sort_keys=True) + "\n")
    assert "differs from the copy inside model.so" in refusal(directory, capsys)


def test_a_manifest_of_another_format_version(copy, capsys) -> None:
    directory = copy()
    text = (directory / "manifest.json").read_text()
    (directory / "manifest.json").write_text(
        text.replace('"format_version": 4', '"format_version": 9')
    )
    assert "format version 9 instead of 4" in refusal(directory, capsys)


def test_an_orin_artifact_on_a_server(made, monkeypatch, capsys) -> None:
    monkeypatch.setattr(stage.platform, "machine", lambda: "x86_64")
    shown = refusal(made["orin"], capsys)
    assert "is for aarch64 hosts (target orin), but this machine is x86_64" in shown


def test_a_processor_without_a_feature(made, monkeypatch, capsys) -> None:
    features = frozenset(get_target("cpu").host_features)
    gone = sorted(features)[0]
    monkeypatch.setattr(stage, "cpu_features", lambda: features - {gone})
    assert f"needs a processor with {gone}, which" in refusal(made["cpu"], capsys)


def test_another_tvm(made, monkeypatch, capsys) -> None:
    monkeypatch.setattr(stage, "tvm_version", lambda: "0.28.0")
    shown = refusal(made["cpu"], capsys)
    assert "compiled with TVM 0.27.0.post1, but TVM 0.28.0 is installed" in shown
    # A runtime that was built from the release's source is the same TVM.
    monkeypatch.setattr(stage, "tvm_version", lambda: "0.27.0")
    open_artifact(made["cpu"])


def test_an_artifact_for_another_gpu() -> None:
    found = Artifact(Path("dist/tiny-3090"), manifest_for(get_target("3090")))
    with pytest.raises(BitMTPError, match=r"for sm_86 \(target 3090\), but NVIDIA H200 .* 9\.0"):
        check_device(found, H200)


@pytest.mark.parametrize(
    ("driver", "cudart", "message"),
    [
        (11080, 13, r"machine code needs driver 525 \(CUDA 12\.0\) .* has CUDA 11\.8"),
        (12080, 13, r"TVM's wheel needs driver 580 \(CUDA 13\.0\) .* has CUDA 12\.8"),
        (11080, 12, "machine code needs driver 525"),
    ],
)
def test_an_old_driver_is_refused_with_the_part_that_needs_more(driver, cudart, message) -> None:
    found = Artifact(Path("dist/tiny-h200"), manifest_for(get_target("h200")))
    with pytest.raises(BitMTPError, match=message):
        check_device(found, replace(H200, driver=driver, cudart=cudart))


def test_a_tvm_built_against_cuda_12_runs_on_its_driver() -> None:
    found = Artifact(Path("dist/tiny-h200"), manifest_for(get_target("h200")))
    check_device(found, replace(H200, driver=12060, cudart=12))


@pytest.mark.parametrize("name", ["cpu", "h200"])
def test_too_little_memory(name: str) -> None:
    found = Artifact(Path("dist/tiny"), manifest_for(get_target(name)))
    facts = replace(H200, free=found.manifest.memory.total)
    assert check_device(found, facts) is facts
    with pytest.raises(
        BitMTPError, match=r"needs 6 MiB at a context of 32, but .* smaller --context"
    ):
        check_device(found, replace(facts, free=facts.free - 1))


def test_a_changed_shard_of_the_same_size(copy) -> None:
    found = open_artifact(copy())
    path = found.directory / SHARD
    contents = bytearray(path.read_bytes())
    contents[-1] ^= 1
    path.write_bytes(contents)
    with pytest.raises(BitMTPError, match="was changed or damaged"):
        list(read_parameters(found.directory, found.manifest.shards))


def test_a_library_that_tvm_refuses(made) -> None:
    with pytest.raises(BitMTPError, match="TVM cannot load"):
        load_library(Artifact(made["orin"], manifest_for(get_target("cpu"))))


def listing(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("fault", [ValueError, KeyboardInterrupt, OSError])
def test_a_failed_write_leaves_nothing(fault, tmp_path: Path) -> None:
    expected = BitMTPError if fault is OSError else fault
    with pytest.raises(expected), write_artifact(tmp_path / "deep" / "new") as folder:
        (folder / "params").write_text("half")
        raise fault
    assert listing(tmp_path / "deep") == []


def test_what_is_no_whole_artifact_does_not_become_one(copy, tmp_path: Path) -> None:
    with pytest.raises(BitMTPError, match=r"model\.so is missing"):
        with write_artifact(tmp_path / "new") as folder:
            (folder / "manifest.json").write_text("{}")
    assert listing(tmp_path) == []


def test_an_older_artifact_is_replaced_only_by_a_whole_one(copy, tmp_path: Path) -> None:
    directory = copy()
    (directory / "t_w.json").write_text("{}")
    with pytest.raises(ValueError), write_artifact(directory):
        raise ValueError
    assert open_artifact(directory).manifest.context == 32
    write_tiny(directory, "cpu", context=64)
    assert open_artifact(directory).manifest.context == 64
    assert not (directory / "t_w.json").exists()
    assert listing(tmp_path) == ["cpu"]


def test_foreign_files_are_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("")
    (tmp_path / "file").write_text("")
    for name in ("mine", "file", "none/.."):
        with pytest.raises(UsageError, match="choose another -o"), write_artifact(tmp_path / name):
            raise AssertionError("the block must not start")
    assert listing(tmp_path / "mine") == ["thesis.tex"]
    assert listing(tmp_path) == ["file", "mine"]


def test_what_a_link_names_is_replaced_and_the_link_stays(copy, tmp_path: Path) -> None:
    directory, link = copy(), tmp_path / "current"
    link.symlink_to(directory)
    write_tiny(link, "cpu", context=64)
    assert link.is_symlink() and open_artifact(directory).manifest.context == 64


@pytest.mark.gpu
def test_the_real_device_is_read_and_an_artifact_for_another_is_refused() -> None:
    found = Artifact(Path("dist/tiny-orin"), manifest_for(get_target("orin")))
    with pytest.raises(BitMTPError, match="compute capability"):
        check_device(found)
