"""What holds for the repository as a whole: import arrows, commands, words, versions."""

import re
import subprocess

import pytest
from imports import ROOT, modules, names_used, within

from bitmtp_tvm import bench as bench_command
from bitmtp_tvm import compile as compile_command
from bitmtp_tvm import evaluate as evaluate_command
from bitmtp_tvm import generate as generate_command
from bitmtp_tvm import trace as trace_command
from bitmtp_tvm import train as train_command
from bitmtp_tvm import tune as tune_command
from bitmtp_tvm.targets import TARGETS

# What runs a compiled model, and needs no compiler: it is closed under import.
RUNTIME = {
    f"bitmtp_tvm.{name}"
    for name in (
        "acceptance",
        "arguments",
        "artifact",
        "bench",
        "bench_kernels",
        "bench_modes",
        "bench_steps",
        "cache",
        "chat",
        "cli",
        "decoder",
        "demo",
        "device",
        "device_state",
        "elf",
        "engine",
        "errors",
        "evaluation",
        "evaluation.artifact_rows",
        "evaluation.calibration",
        "evaluation.completions",
        "evaluation.held_out",
        "evaluation.human_eval",
        "evaluation.intervals",
        "evaluation.pictures",
        "evaluation.prediction",
        "evaluation.progress",
        "evaluation.report",
        "evaluation.rows",
        "evaluation.sandbox",
        "evaluation.sandbox_child",
        "evaluation.sources",
        "evaluation.tables",
        "flight",
        "generate",
        "generation",
        "libraries",
        "manifest",
        "mode_rows",
        "modes",
        "peer",
        "peer_model",
        "plotting",
        "policy",
        "recording",
        "records",
        "reference",
        "reference.choose",
        "reference.head_bound",
        "reference.ops",
        "sampling",
        "session",
        "snapshot",
        "statistics",
        "step_loop",
        "step_times",
        "step_timing",
        "stopping",
        "streaming",
        "targets",
        "text",
        "threads",
        "timing",
        "trace",
        "trace_picture",
        "tuning_bench",
        "tuning_chain",
        "tuning_fixed",
        "tuning_inputs",
        "tuning_log",
        "tuning_measure",
        "tuning_merge",
        "tuning_plan",
        "tuning_process",
        "tuning_rpc",
        "tuning_worker",
    )
} | {"bitmtp_tvm"}
TVM_COMPILER = {"tvm.relax", "tvm.s_tir", "tvm.script", "tvm.te", "tvm.tirx", "tvm.topi"}
# Of relax_models, the layouts of the device's state and of weights; they need no TVM (below).
LAYOUTS = {"relax_models.bounded_head", "relax_models.formats", "relax_models.state"}
COMPILER = TVM_COMPILER | {"relax_models", "schedules", "cuda", "ziglang"}

PACKAGES = ("bitmtp_tvm", "relax_models", "schedules", "tests")
CHECKS = ("ruff check .", "ruff format --check .", "mypy", "pytest")


def used_by(package):
    """Module name -> dotted names that it refers to, for every module of a package."""
    return {
        name: names_used(path.read_text(), name, path.name == "__init__.py")
        for name, path in modules(package).items()
    }


@pytest.mark.parametrize(
    ("package", "others"),
    [
        ("relax_models", {"bitmtp_tvm", "schedules", "tests"}),
        ("schedules", {"bitmtp_tvm", "relax_models", "tests"}),
        ("bitmtp_tvm", {"tests"}),
    ],
)
def test_imports_point_one_way(package, others):
    found = {
        f"{module} -> {name}"
        for module, names in used_by(package).items()
        for name in names
        if within(name, others)
    }
    assert not found


@pytest.mark.parametrize("module", ["config", "formats", "quantizers", "state"])
def test_shapes_and_formats_need_no_tvm(module):
    names = used_by("relax_models")[f"relax_models.{module}"]
    assert not {name for name in names if within(name, {"tvm", "tvm_ffi"})}


def test_the_runtime_half_imports_no_compiler():
    everything = used_by("bitmtp_tvm")
    assert everything.keys() >= RUNTIME, "a module of the list is gone"
    compiling = everything.keys() - RUNTIME
    found = {
        f"{module} -> {name}"
        for module in RUNTIME
        for name in everything[module]
        # Every module of the list is held to it, so what they import in turn is covered.
        if not within(name, LAYOUTS) and (within(name, COMPILER) or within(name, compiling))
    }
    assert not found


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("import tvm.relax", "tvm.relax"),
        ("import tvm.relax.transform as t", "tvm.relax.transform"),
        ("from tvm import relax as r", "tvm.relax"),
        ("def f():\n    from tvm.relax import Call", "tvm.relax"),
        ("import tvm\nx = tvm.relax.build", "tvm.relax.build"),
        ("from . import build", "bitmtp_tvm.build"),
        ("from .checkpoint import hf", "bitmtp_tvm.checkpoint.hf"),
        ("import importlib\nimportlib.import_module('tvm.te')", "tvm.te"),
    ],
)
def test_an_import_is_seen_in_every_spelling(line, name):
    assert name in names_used(line, "bitmtp_tvm.session")


def test_what_only_a_type_checker_reads_is_no_import():
    text = "if TYPE_CHECKING:\n    import tvm.relax\nelse:\n    import tvm.te"
    assert names_used(text, "bitmtp_tvm.session") == {"tvm.te"}


def readme_commands():
    """The lines of the README's shell blocks."""
    blocks = re.findall(r"```sh\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    return [line for block in blocks for line in block.splitlines()]


def test_ci_runs_the_test_command_of_the_readme():
    (command,) = [line for line in readme_commands() if "pytest" in line]
    script = ROOT / ".ci" / "run"
    shown = subprocess.run([script, "--show"], capture_output=True, text=True, check=True)
    assert shown.stdout == command + "\n"
    for check in CHECKS:
        assert f"&& .venv/bin/{check} &&" in command + " &&"


def test_a_readme_command_is_one_line_that_runs_from_a_new_clone():
    first, *_ = commands = readme_commands()
    assert "-m bitmtp_tvm.compile --target orin" in first
    assert not [line for line in commands if line.endswith("\\")]
    made = [line for line in commands if line.startswith("python3 -m venv .venv && ")]
    assert len(made) == 2
    rest = [line for line in commands if line not in made]
    assert all(line.startswith(".venv/bin/") for line in rest)


def table_of(heading):
    """First cells, without backticks, of the table below a heading of the README."""
    text = (ROOT / "README.md").read_text()
    section = text.split(f"{heading}\n")[1].split("\n#")[0]
    return re.findall(r"^\| `([^` ]+)", section, re.MULTILINE)


def test_the_readme_lists_every_target():
    assert table_of("## Targets") == ["--target", *TARGETS]


@pytest.mark.parametrize(
    "command",
    [
        compile_command,
        generate_command,
        bench_command,
        trace_command,
        evaluate_command,
        train_command,
        tune_command,
    ],
)
def test_the_readme_lists_every_option(command, capsys):
    with pytest.raises(SystemExit):
        command.main(["--help"])
    options = re.findall(r"^  (-[^ ,\n]+)", capsys.readouterr().out, re.MULTILINE)
    assert sorted(table_of(f"### `python -m {command.__name__}`")) == sorted(set(options) - {"-h"})


def test_the_changelog_starts_with_the_version_of_the_package():
    (version,) = re.findall(
        r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE
    )
    headings = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[:2] == ["Unreleased", version]


def text_files():
    folders = [ROOT / name for name in (*PACKAGES, "tuning_logs", ".ci")]
    paths = [path for folder in folders for path in folder.rglob("*")]
    paths += [path for path in ROOT.iterdir() if path.suffix in (".md", ".toml", ".yaml")]
    kinds = ("", ".py", ".md", ".toml", ".yaml")
    return sorted(path for path in paths if path.is_file() and path.suffix in kinds)


# Split, so that this file passes its own test.
FOREIGN = {
    "a path of one machine": r"(?<![\w.])/" + r"(work|root|home|Users|mnt|opt|tmp)/\w",
    "a package index": "(pypi|py" + r"thonhosted|npmjs|debian|anaconda)\.(org|com)",
}


@pytest.mark.parametrize("what", FOREIGN)
def test_no_file_names(what):
    pattern = re.compile(FOREIGN[what])
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in text_files()
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if pattern.search(line)
    ]
    assert not found
