"""The compile command: what it writes, what it prints, and what it refuses beforehand."""

import json
import shutil

import pytest
from bitnet_checkpoint import DEMO, ODD, write_checkpoint

from bitmtp_tvm import elf
from bitmtp_tvm.artifact import open_artifact
from bitmtp_tvm.checkpoint import open_checkpoint
from bitmtp_tvm.compile import CompileOptions, compile_model, find_checkpoint, main
from bitmtp_tvm.cubin import find_cubins
from bitmtp_tvm.errors import BitMTPError
from bitmtp_tvm.manifest import embedded_manifest
from bitmtp_tvm.reference.model import ReferenceModel
from bitmtp_tvm.session import Session


@pytest.fixture(scope="module")
def odd(tmp_path_factory):
    folder = tmp_path_factory.mktemp("odd") / "odd-bitnet"
    write_checkpoint(folder, ODD)
    return folder


def fails(capsys, code, words, *arguments):
    """The command ends with `code` and one line on stderr that holds `words`."""
    assert main([str(argument) for argument in arguments]) == code
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: ")
    assert words in error
    return error


@pytest.fixture(scope="module")
def orin(tmp_path_factory):
    """The demo for Orin: artifact folder and manifest."""
    folder = tmp_path_factory.mktemp("orin") / "demo-orin"
    return folder, compile_model(CompileOptions("orin", output=folder, widths=(1, 4)))


def test_an_orin_artifact_is_aarch64_with_sm_87_machine_code(orin):
    folder, manifest = orin
    library = (folder / "model.so").read_bytes()
    assert elf.parse(library).machine == "aarch64"
    assert b"__global__" not in library
    cubins = find_cubins(library)
    assert {(cubin.sm, cubin.abi_version, cubin.toolkit) for cubin in cubins} == {(87, 7, (12, 6))}
    kernels = {kernel.name: kernel for cubin in cubins for kernel in cubin.kernels}
    assert {name.removesuffix("_kernel") for name in kernels} >= {k.name for k in manifest.kernels}
    assert not any(kernel.stack_bytes for kernel in kernels.values())
    assert manifest.arch == "sm_87"
    assert manifest.host_triple == "aarch64-linux-gnu"
    assert manifest.least_drivers == {"machine_code": 525, "runtime": 580}
    assert manifest.versions["toolkit"].startswith("12.")


def test_the_manifest_lists_every_kernel_as_untuned(orin):
    _, manifest = orin
    assert set(manifest.counts) == {"rule", "fixed"}
    assert sum(manifest.counts.values()) == len(manifest.kernels)
    linears = [kernel for kernel in manifest.kernels if kernel.op == "low_bit_linear"]
    assert all(kernel.template and kernel.arguments for kernel in linears)
    assert {kernel.width for kernel in manifest.kernels} == {1, 4, 128}


def test_an_orin_artifact_is_refused_here(orin):
    with pytest.raises(BitMTPError, match="is for aarch64 hosts"):
        open_artifact(orin[0])


def test_a_random_checkpoint_of_a_preset_gives_a_working_artifact(tmp_path, monkeypatch):
    """A small shape under the preset's name: the real one takes minutes."""
    from relax_models import config

    small = dict(ODD, architecture="bitnet", rms_norm_eps=1e-5, rope_theta=1e4)
    small |= {"hidden_act": "relu2", "tie_word_embeddings": True}
    monkeypatch.setitem(config.PRESETS, "bitnet-2b", config.ModelConfig.from_dict(small))
    folder = tmp_path / "artifact"
    options = CompileOptions("cpu", "bitnet-2b", random_weights=True, output=folder, widths=(2,))
    manifest = compile_model(options)
    assert manifest.tokenizer.file is None
    session = Session(open_artifact(folder))
    chosen = session.decode([3, 4], [0, 1], 0, None, [1])
    from bitmtp_tvm.checkpoint import random_checkpoint

    twin = ReferenceModel.from_checkpoint(random_checkpoint(config.PRESETS["bitnet-2b"]), 8)
    logits = twin.forward([3, 4], [0, 1], 0, None, twin.new_cache(8, half=True))
    assert chosen[0] == logits[1].argmax()


def test_the_default_folder_context_and_report(odd, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["--target", "cpu", "--model", str(odd), "--context", "40", "--widths", "2,1"]) == 0
    folder = tmp_path / "dist" / "odd-bitnet-cpu"
    names = {path.name for path in folder.iterdir()}
    assert names == {"manifest.json", "model.so", "params-00001.safetensors"}
    manifest = json.loads((folder / "manifest.json").read_text())
    assert embedded_manifest(folder / "model.so") == (folder / "manifest.json").read_text()
    assert (manifest["context"], manifest["slots"], manifest["widths"]) == (40, 168, [1, 2])
    out = capsys.readouterr().out
    assert "odd-bitnet for cpu" in out
    assert "memory at a context of 40" in out
    counts = manifest["counts"]
    shown = f"({counts['rule']} rule, {counts['fixed']} fixed)"
    assert f"kernels: {len(manifest['kernels'])} {shown}" in out
    for op in {kernel["op"] for kernel in manifest["kernels"]}:
        assert f"    {op} " in out


@pytest.mark.parametrize(
    ("words", "arguments"),
    [
        ("orin-nano", ["--target", "orin-nono"]),
        ("serves 1 to 2048", ["--target", "cpu", "--context", "4096"]),
        ("serves 1 to 2048", ["--target", "cpu", "--context", "0"]),
        ("--random-weights needs --model", ["--target", "cpu", "--random-weights"]),
        ("bitnet-2b", ["--target", "cpu", "--random-weights", "--model", "bitnet-7b"]),
        ("add --random-weights", ["--target", "cpu", "--model", "bitnet-2b"]),
        ("--model is empty", ["--target", "cpu", "--model", ""]),
        (
            "--block-size is about a checkpoint's files",
            ["--target", "cpu", "--random-weights", "--model", "bonsai-1.7b", "--block-size", "4"],
        ),
        (
            "there is no rule 'x'",
            ["--target", "cpu", "--random-weights", "--model", "bonsai-1.7b", "--quant", "x"],
        ),
        (
            "--quant is for a Bonsai: bitnet-2b has its own rule",
            [
                *("--target", "cpu", "--random-weights", "--model", "bitnet-2b"),
                *("--quant", "binary-g128"),
            ],
        ),
    ],
)
def test_options_that_cannot_be_served(capsys, tmp_path, words, arguments):
    output = tmp_path / "out"
    fails(capsys, 2, words, *arguments, "-o", output)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("quant", "name", "weight_format"),
    [
        (None, "bonsai-1.7b", "ternary-g128"),
        ("binary-g128", "bonsai-1.7b-binary-g128", "binary-g128"),
        ("ternary-g128-absmean", "bonsai-1.7b-ternary-g128", "ternary-g128"),
    ],
)
def test_the_rule_of_random_weights(quant, name, weight_format):
    options = CompileOptions("cpu", "bonsai-1.7b", random_weights=True, quant=quant)
    found = find_checkpoint(options)
    assert (found.name, found.config.weight_format) == (name, weight_format)


@pytest.mark.parametrize("widths", ["0", "65", "1,x", "", "1,,2"])
def test_widths_that_are_none(capsys, widths):
    with pytest.raises(SystemExit) as exit_:
        main(["--target", "cpu", "--widths", widths])
    assert exit_.value.code == 2
    assert "is not a list of widths from 1 to 64" in capsys.readouterr().err


def test_a_folder_that_is_no_artifact_is_not_replaced(capsys, tmp_path, odd):
    (tmp_path / "precious").write_text("keep me")
    fails(capsys, 2, "is no artifact", "--target", "cpu", "--model", odd, "-o", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["precious"]


def test_a_folder_with_a_foreign_file_is_not_replaced(capsys, tmp_path, odd):
    """A manifest.json alone makes no artifact: web applications have one too."""
    (tmp_path / "manifest.json").write_text('{"name": "My PWA"}')
    fails(capsys, 2, "is no artifact", "--target", "cpu", "--model", odd, "-o", tmp_path)
    for name in ("model.so", "thesis.tex"):
        (tmp_path / name).write_text("precious")
    fails(capsys, 2, "holds thesis.tex", "--target", "cpu", "--model", odd, "-o", tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"manifest.json", "model.so", "thesis.tex"}


def test_what_appears_in_the_folder_meanwhile_is_kept(capsys, tmp_path, odd, monkeypatch):
    output = tmp_path / "out"

    def meanwhile(checkpoint, folder):
        output.mkdir()
        (output / "thesis.tex").write_text("precious")

    monkeypatch.setattr("bitmtp_tvm.compile.write_text_files", meanwhile)
    options = ["--target", "cpu", "--model", odd, "--widths", "1", "-o", output]
    fails(capsys, 2, "so it is no artifact", *options)
    assert (output / "thesis.tex").read_text() == "precious"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("inside", ["", "dump"])
def test_a_dump_into_the_artifact_is_refused_before_the_work(capsys, tmp_path, odd, inside):
    output = tmp_path / "out"
    options = ["--target", "cpu", "--model", odd, "-o", output, "--dump", output / inside]
    fails(capsys, 2, "lies in the artifact's folder", *options)
    assert not list(tmp_path.iterdir())


def test_the_current_folder_is_not_replaced(capsys, tmp_path, odd, monkeypatch):
    monkeypatch.chdir(tmp_path)
    fails(capsys, 2, "current folder", "--target", "cpu", "--model", odd, "-o", ".")


def test_a_damaged_checkpoint_leaves_nothing_behind(capsys, tmp_path):
    broken = tmp_path / "broken"
    shutil.copytree(DEMO, broken)
    shard = broken / "model-00002-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1000])
    output = tmp_path / "out"
    fails(capsys, 1, shard.name, "--target", "cpu", "--model", broken, "-o", output)
    assert {path.name for path in tmp_path.iterdir()} == {"broken"}


def test_a_failure_while_building_leaves_nothing_behind(capsys, tmp_path, odd, monkeypatch):
    from bitmtp_tvm import build

    def broken(*arguments, **options):
        raise BitMTPError("the linker is on strike")

    monkeypatch.setattr(build, "link", broken)
    output = tmp_path / "out"
    fails(capsys, 1, "on strike", "--target", "cpu", "--model", odd, "-o", output)
    assert not list(tmp_path.iterdir())


def test_a_missing_linker_is_found_before_the_work(capsys, tmp_path, odd, monkeypatch):
    from importlib import util

    find = util.find_spec
    monkeypatch.setattr(util, "find_spec", lambda name: None if name == "ziglang" else find(name))
    arguments = ["--target", "cpu", "--model", odd, "-o", tmp_path / "out"]
    assert ".[compile]" in fails(capsys, 1, "ziglang", *arguments)


def test_an_old_artifact_is_replaced(odd, tmp_path):
    folder = tmp_path / "artifact"
    first = CompileOptions("cpu", str(odd), context=20, output=folder, widths=(1,))
    compile_model(first)
    compile_model(CompileOptions("cpu", str(odd), context=30, output=folder, widths=(1,)))
    assert open_artifact(folder).manifest.context == 30
    assert [path.name for path in tmp_path.iterdir()] == ["artifact"]


def test_a_context_that_nobody_can_plan_for_needs_the_option(capsys, tmp_path, odd, monkeypatch):
    from bitmtp_tvm import compile as command

    monkeypatch.setattr(command, "MOST_CONTEXT", 10)
    options = ["--target", "cpu", "--model", odd, "-o", tmp_path / "out"]
    fails(capsys, 2, "give --context, at most 10", *options)
    assert not list(tmp_path.iterdir())


def test_a_chat_template_that_is_no_text_is_refused_before_the_work(odd):
    from bitmtp_tvm.checkpoint import open_checkpoint
    from bitmtp_tvm.compile import check_template

    checkpoint = open_checkpoint(odd)
    checkpoint.chat_template = "\ud800 hi"
    with pytest.raises(BitMTPError, match="chat template of odd-bitnet is not valid text"):
        check_template(checkpoint)


def measured_folder(folder, model):
    """Records of the processor for every kernel of a checkpoint: portions of one task."""
    from bitmtp_tvm.compile import make_plan, symbolic_model
    from bitmtp_tvm.databases import read_database, with_record, write_database
    from bitmtp_tvm.pipeline import unscheduled
    from bitmtp_tvm.records import DeviceInfo, write_device_info
    from bitmtp_tvm.specialize import buckets
    from bitmtp_tvm.targets import tvm_target
    from schedules.rule import operation_of

    plan = make_plan(CompileOptions("cpu", str(model), context=40, widths=(2,)))
    target = tvm_target(plan.target)
    wanted = buckets(plan.target.widths, plan.target.prefill)
    database = read_database(folder)
    for func in unscheduled(symbolic_model(plan), wanted, target).values():
        operation = operation_of(func, target)
        if operation:
            decided = operation.schedule()[1].made
            least = {name: 1 for name in decided if name == "grain"}
            database = with_record(database, operation, target, decided | least, 1e-6)
    write_database(folder, database)
    write_device_info(folder, DeviceInfo("cpu", "this one"))


def test_measured_kernels_are_counted_and_can_be_required(odd, tmp_path, capsys):
    required = ["--target", "cpu", "--model", odd, "--context", 40, "--widths", 2]
    required += ["--require-tuned", "--records", tmp_path / "records"]
    (tmp_path / "records").mkdir()
    error = fails(capsys, 1, "were not measured on cpu (", *required, "-o", tmp_path / "out")
    assert ", …)" in error and "step_rows" not in error
    assert [path.name for path in tmp_path.iterdir()] == ["records"]
    measured_folder(tmp_path / "records", odd)
    arguments = [*required, "--verbose", "-o", tmp_path / "out"]
    assert main([str(argument) for argument in arguments]) == 0
    out = capsys.readouterr().out
    manifest = open_artifact(tmp_path / "out").manifest
    measured, fixed = manifest.counts["measured"], manifest.counts["fixed"]
    assert measured + fixed == len(manifest.kernels)
    assert f"({measured} measured on cpu, {fixed} fixed)" in out
    assert "embed_w2: lanes=8 grain=1 (measured on cpu)" in out
    session = Session(open_artifact(tmp_path / "out"))
    twin = ReferenceModel.from_checkpoint(open_checkpoint(odd), 8)
    logits = twin.forward([3, 4], [0, 1], 0, None, twin.new_cache(8, half=True))
    assert session.decode([3, 4], [0, 1], 0, None, [1])[0] == logits[1].argmax()


def test_a_folder_of_records_that_is_none_is_refused(capsys, tmp_path, odd):
    options = ["--target", "cpu", "--model", odd, "-o", tmp_path / "out"]
    fails(capsys, 2, "is no folder", *options, "--records", tmp_path / "none")
    (tmp_path / "templates.json").write_text("{")
    fails(capsys, 1, "templates.json is damaged", *options, "--records", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["templates.json"]
