"""The command: what it tunes, how it shares the trials, what it builds, what it refuses."""

import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
from bitnet_checkpoint import WIDE, write_checkpoint
from lost_signal import Losing, ended_at_once

from bitmtp_tvm import nvrtc, tune, tuning_build, tuning_run
from bitmtp_tvm.compile import CompileOptions
from bitmtp_tvm.cubin import find_cubins
from bitmtp_tvm.errors import BitMTPError, UsageError
from bitmtp_tvm.records import Key, Record, Records
from bitmtp_tvm.reference.head_bound import code_head, plain_request
from bitmtp_tvm.targets import get_target
from bitmtp_tvm.tune import TuneOptions, main
from bitmtp_tvm.tuning_build import Built, Wanted, build_all, with_built
from bitmtp_tvm.tuning_inputs import OPERATIONS, is_right, make_inputs
from bitmtp_tvm.tuning_plan import Candidate, Task, read_plan

WIDTHS = (1, 4)
PREFILL = (128, 512)
# Of a layer: the linears of qkv, output, gate and up, down; and attention behind the first.
KERNELS = 5
TASKS = KERNELS * (len(WIDTHS) + len(PREFILL))
LAYERS = WIDE["num_hidden_layers"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    directory = tmp_path_factory.mktemp("checkpoint")
    write_checkpoint(directory, WIDE)
    return str(directory)


@pytest.fixture(scope="module")
def model(checkpoint):
    from bitmtp_tvm.toolchain import prepare_cuda

    prepare_cuda()
    from bitmtp_tvm.tuning_tasks import find_tasks

    return find_tasks(CompileOptions("h200", checkpoint, widths=WIDTHS))


def test_tasks_are_the_linears_and_the_attention_of_a_step_in_its_order(model):
    names = [found.task.name for found in model.found]
    assert len(set(names)) == len(names) == TASKS
    searched = {
        bucket: tuple(name for name in sequence if name in names)
        for bucket, sequence in model.buckets.items()
    }
    assert list(model.buckets) == ["step_w1", "step_w4", "prefill_w128", "prefill_w512"]
    for width in WIDTHS:
        sequence = searched[f"step_w{width}"]
        layer = sequence[:KERNELS]
        assert sequence == layer * LAYERS and len(set(layer)) == KERNELS
        keys = [model.found[names.index(name)].task.key for name in layer]
        assert keys[1].op == "attention_parts"
        assert [key.n for key in keys if "linear" in key.op] == [
            (4 + 2 * 2) * 34,
            136,
            2 * 260,
            136,
        ]
        # One row is normed where it is multiplied; behind the gate, which ends within a tile, not.
        normed = [key.op.startswith("norm_") for key in keys]
        assert normed == [width == 1, False, width == 1, width == 1, False]
    for found in model.found:
        task = found.task
        for bucket, count in task.counts.items():
            assert searched[bucket].count(task.name) == count
        if "linear" in task.key.op:
            assert task.weight_bytes >= task.key.n * task.settings["size"] / 4
        assert found.choices[0].arguments() == _ruled(found)
    # Prefill asks for no logits: its last layer ends behind the K/V write.
    for width in PREFILL:
        assert len(searched[f"prefill_w{width}"]) == KERNELS * LAYERS - (KERNELS - 1)


def test_the_kernels_between_keep_their_places(model):
    fixed = {item.task.name: item.task for item in model.fixed}
    searched = {found.task.name for found in model.found}
    for name in ("step_w4", "prefill_w128"):
        assert set(model.buckets[name]) <= searched | fixed.keys()
    ops = [fixed[n].key.op if n in fixed else "*" for n in model.buckets["step_w4"]]
    assert ops[:2] == ["step_rows", "embed"]
    layer = ["norm_quantize", "*", "rope_kv_write", "*", "attention_join", "norm_quantize", "*"]
    layer += ["norm_quantize", "*", "gated_norm_quantize", "*"]
    assert ops[2:-5] == layer * LAYERS
    assert ops[-5:] == ["final_norm", "head", "softmax_parts", "choose", "accept"]
    norm = fixed["norm_quantize_w4"]
    assert norm.fixed and norm.names[:2] == ("x", "weight") and norm.reads == norm.weight_bytes > 0
    assert fixed["embed_w4"].reads == fixed["rope_kv_write_w4"].reads == 0


def test_what_is_left_out_stays_as_records_and_rules_have_it(model, checkpoint, tmp_path):
    from bitmtp_tvm.tuning_tasks import find_tasks

    options = CompileOptions("h200", checkpoint, widths=(4,))
    with pytest.raises(UsageError, match="--ops heads: the model has accept, attention, attention"):
        find_tasks(options, ("attention_parts", "heads"))
    some = find_tasks(options, ("attention_parts",))
    assert [found.task.key.op for found in some.found] == ["attention_parts"]
    assert len(some.buckets["step_w4"]) == len(model.buckets["step_w4"])
    # Prefill has no such kernel, so there is nothing to look for, and no chain.
    assert some.buckets["prefill_w128"] == () and all(
        item.task.counts.keys() == {"step_w4"} for item in some.fixed
    )
    other = next(f for f in model.found if f.task.key.width == 4 and "linear" in f.task.key.op)
    tile = other.choices[-1]
    record = Record(other.task.key, tile.template.name, tile.arguments(), 1e-6, "measured", "h200")
    records = Records.read(tmp_path)
    records.put([record])
    records.write(tmp_path, None)
    kept = [item for item in some.fixed if item.task.key.op == "low_bit_linear"]
    chosen = tuning_run.fixed_kernels(replace(some, fixed=tuple(kept)), tmp_path)
    tiles = {item.task.key: (item.template, item.arguments) for item in chosen}
    assert tiles[other.task.key] == (tile.template.name, tile.arguments())
    ruled = {f.task.key: f.choices[0] for f in model.found if f.task.key.op == "low_bit_linear"}
    keys = tiles.keys() - {other.task.key}
    assert len(keys) == 3
    assert all(tiles[k] == (ruled[k].template.name, ruled[k].arguments()) for k in keys)


def _ruled(found):
    from bitmtp_tvm.cards import card_of
    from schedules.rule import TEMPLATES
    from schedules.space import ruled

    templates = TEMPLATES["cuda"][found.work.op]
    return ruled(templates, found.work, card_of(get_target("h200"))).arguments()


def test_every_operation_with_templates_has_inputs():
    from schedules.rule import TEMPLATES

    assert {op for ops in TEMPLATES.values() for op in ops} == set(OPERATIONS)


def test_what_a_head_is_tuned_with_ends_with_the_vocabulary():
    """Of 1001 rows of the table the last tile of 16 has nine: those are compared as well."""
    shapes = ((3, 2, 128), (3, 3), (63, 1, 4, 32, 4), (3, 1008), (3,), (3,), (3, 1001))
    dtypes = ("int8", "float32", "uint32", "float32", "int32", "int32", "float32")
    key = Key("head_codes", "", 1001, 256, 3, residual=False, overlap=True)
    task = Task("head", key, {}, shapes, dtypes, (2, 3), 0, {})
    inputs = make_inputs(task, "cuda")
    assert [(a.shape, str(a.dtype)) for a in inputs.arguments] == [
        *zip(shapes, dtypes, strict=True)
    ]
    q, spread, codes, bounds, *_ = inputs.arguments
    logits, _ = code_head(q, spread, codes, bounds, 128, plain_request(3, 1001))
    assert is_right(inputs, [inputs.arguments[-2], logits])
    logits[2, 1000] += np.abs(logits).max() / 1000
    assert not is_right(inputs, [inputs.arguments[-2], logits])


@pytest.mark.parametrize("trials", [0, 5, 9, 40, 500])
def test_trials_go_where_the_time_goes(trials):
    from bitmtp_tvm.tuning_tasks import budgets

    gains, available = [1.0, 8.0, 4.0, 2.0], [50, 100, 3, 1]
    given = budgets(gains, available, trials)
    assert all(1 <= count <= most for count, most in zip(given, available, strict=True))
    assert sum(given) == max(4, min(trials, sum(available)))
    if trials == 5:
        assert given == [1, 2, 1, 1]
    if trials == 40:
        assert given[1] > 2 * given[0] and given[2:] == [3, 1]


def test_what_was_measured_far_from_its_floor_gets_more(model, tmp_path):
    from bitmtp_tvm.tuning_tasks import expected_gain

    task = model.found[0].task
    guess = expected_gain(task, 4800.0)
    floor = task.floor(4800.0)
    records = Records.read(tmp_path)
    gains = []
    for seconds in (1.2 * floor + 1e-8, 20e-6):
        records.put([Record(task.key, "t", {}, seconds, "measured", "h200")])
        gains.append(expected_gain(task, 4800.0, records))
    assert gains[0] < guess < gains[1]


@pytest.mark.parametrize("trials", [TASKS + 1, 3 * TASKS])
def test_what_records_give_is_built_beside_the_rule_s(model, tmp_path, trials):
    place = next(i for i, found in enumerate(model.found) if len(found.choices) > 3)
    found = model.found[place]
    choice = found.choices[-1]
    records = Records.read(tmp_path)
    record = Record(
        found.task.key, choice.template.name, choice.arguments(), 1e-6, "measured", "h200"
    )
    records.put([record])
    records.write(tmp_path, None)
    options = TuneOptions("h200", records=tmp_path, trials=trials)
    everything = tuning_run.wanted_kernels(options, model)
    wanted = [w for w in everything if w.task.name == found.task.name]
    assert [w.rule for w in wanted] == [True] + [False] * (len(wanted) - 1)
    assert [w.current for w in wanted] == [False, True] + [False] * (len(wanted) - 2)
    assert wanted[1].arguments == choice.arguments()
    made = Candidate("", "", "", {})
    built = [Built(w, replace(made, function=w.function)) for w in wanted]
    task = with_built(found.task, built)
    assert task.current == wanted[1].function == task.candidates[1].function
    # The others have none, and what is in force there is the rule's.
    other = model.found[place - 1].task.name
    assert next(w.current for w in everything if w.task.name == other)


def test_build_only_makes_a_folder_that_opens(model, tmp_path, capsys, monkeypatch):
    folder = tmp_path / "made"
    monkeypatch.setattr(tuning_run, "find", lambda options: model)
    arguments = ["--target", "h200", "--trials", str(TASKS + 1), "--build-only", str(folder)]
    assert main(arguments) == 0
    assert f"{TASKS + 1} kernels of {TASKS} tasks for h200" in capsys.readouterr().out
    found = read_plan(folder, "h200")
    candidates = [c for item in found.tasks for c in item.candidates]
    assert sorted(len(item.candidates) for item in found.searched) == [1] * (TASKS - 1) + [2]
    fixed = {item.name: item for item in found.tasks if item.fixed}
    assert fixed.keys() == {item.task.name for item in model.fixed}
    assert all(item.candidates[0].function == name for name, item in fixed.items())
    assert found.arch == "sm_90a" and found.buckets == model.buckets
    for library in {c.library for c in candidates}:
        contents = (folder / library).read_bytes()
        built = {k.name for cubin in find_cubins(contents) for k in cubin.kernels}
        wanted = {f"{c.function}_kernel" for c in candidates if c.library == library}
        assert built == wanted and b"__global__" not in contents
        assert {cubin.sm for cubin in find_cubins(contents)} == {90}
    assert all(0 < c.registers <= 255 and not c.stack_bytes for c in candidates)


def wanted(count, model):
    return [
        Wanted(found.task, choice.template.name, choice.arguments(), rule=False)
        for found in model.found[:count]
        for choice in found.choices[:1]
    ]


def test_a_compiler_that_fails_costs_one_kernel(model, tmp_path, monkeypatch):
    items = wanted(8, model)
    bad = items[5].function

    def run_job(self, text, out, kernels):
        if bad in text:
            return "does not compile: a crash"
        out.with_name(f"{out.name}.so").write_bytes(b"")
        names = [item.function for item in items if f'"{item.function}"' in text]
        report = ", ".join(f'"{name}": {{"registers": 40}}' for name in names)
        out.with_name(f"{out.name}.json").write_text(f"{{{report}}}")
        return ""

    monkeypatch.setattr(tuning_build.Compilers, "run", run_job)
    built = build_all(items, get_target("h200"), tmp_path)
    assert [item.wanted.function for item in built if item.candidate is None] == [bad]
    assert {item.candidate.registers for item in built if item.candidate} == {40}
    ruled = [Wanted(i.task, i.template, i.arguments, True) for i in items]
    with pytest.raises(BitMTPError, match="does not compile: a crash"):
        build_all(ruled, get_target("h200"), tmp_path)


def test_a_ctrl_c_that_was_lost_builds_no_further_batch(model, tmp_path, monkeypatch):
    losing, told = Losing(lambda *job: "does not compile: a crash"), []
    monkeypatch.setattr(tuning_build.Compilers, "run", losing)
    monkeypatch.setattr(tuning_build.os, "sched_getaffinity", lambda process: {0})
    items = wanted(4, model)

    def build():
        # The handler runs in the main thread alone: it was called before.
        losing()
        build_all(items, get_target("h200"), tmp_path, told.append, batch=1)

    assert ended_at_once(build, losing) and not told


def test_an_interrupt_ends_what_compiles_and_nothing_begins_again(tmp_path, monkeypatch):
    compilers = tuning_build.Compilers()
    start, sleeper = compilers._start, [sys.executable, "-c", "import time; time.sleep(600)"]
    monkeypatch.setattr(compilers, "_start", lambda command: start(sleeper))
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(compilers.run, "", tmp_path / "kernels", 1)
        while not compilers._running:
            time.sleep(0.01)
        compilers.stop()
        with pytest.raises(KeyboardInterrupt):
            running.result(timeout=60)
    with pytest.raises(KeyboardInterrupt):
        compilers.run("", tmp_path / "kernels", 1)


def test_a_kernel_that_spills_is_no_candidate_and_the_rule_s_stays(model, tmp_path):
    (item,) = wanted(1, model)
    report = tmp_path / "r.json"
    report.write_text(f'{{"{item.function}": {{"registers": 255, "stack_bytes": 8}}}}')
    (built,) = tuning_build._read_report([item], report, "r.so")
    assert built.candidate is None and built.fault == "spills registers"
    kept = Wanted(item.task, item.template, item.arguments, True)
    (ruled,) = tuning_build._read_report([kept], report, "r.so")
    assert ruled.candidate.stack_bytes == 8
    task = with_built(item.task, [ruled, built, Built(item, None, "does not fit: of a tile")])
    assert [c.function for c in task.candidates] == [item.function]
    assert task.rejected == {"spills registers": 1, "does not fit": 1}


def test_a_tile_that_does_not_fit_is_reported(model):
    from bitmtp_tvm.targets import tvm_target

    (item,) = wanted(1, model)
    kernels = tuning_build.json.loads(tuning_build.job_text([item], get_target("h200")))["kernels"]
    target = tvm_target(get_target("h200"))
    with pytest.raises(ValueError, match="no template nothing of norm_low_bit_linear"):
        tuning_build.make_function({**kernels[0], "template": "nothing"}, "cuda", target)
    func = tuning_build.make_function(kernels[0], "cuda", target)
    assert func.attrs["global_symbol"] == item.function


REFUSED = [
    ((), "give --target, one of: cpu"),
    (("--target", "nothing"), "unknown target 'nothing'"),
    (("--target", "h200", "--rpc", "host:1"), "--rpc and --key go together"),
    (("--target", "h200", "--rpc", "h:1", "--key", "k", "--predict"), "--rpc is about measuring"),
    (("--target", "h200", "--predict"), "--predict and --from go together"),
    (("--target", "h20", "--predict", "--from", "cpu"), "--from cpu is no device of that kind"),
    (("--target", "h20", "--predict", "--from", "h20"), "--from h20 is the target itself"),
    (("--target", "h20", "--model", "bitnet-2b", "--build-only", "x"), "add --random-weights"),
    (("--target", "cpu", "--build-only", "x"), "has templates on cpu"),
]


@pytest.mark.parametrize(("arguments", "sentence"), REFUSED)
def test_refusals(arguments, sentence, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert main(list(arguments)) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: ") and sentence in lines[0]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--widths", "0"), "is not a list of widths from 1 to 64"),
        (("--widths", "1,65"), "is not a list of widths from 1 to 64"),
        (("--minutes", "0"), "'0' is no number of minutes"),
        (("--minutes", "soon"), "'soon' is no number of minutes"),
        (("--trials", "0"), "is not a whole number of at least 1"),
        (("--measure", "a", "--merge", "b"), "not allowed with argument"),
    ],
)
def test_wrong_options(arguments, sentence, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--target", "h200", *arguments])
    assert ended.value.code == 2 and sentence in capsys.readouterr().err


def test_a_foreign_folder_is_not_touched(checkpoint, tmp_path, capsys):
    arguments = ["--target", "h200", "--model", checkpoint, "--build-only", str(tmp_path)]
    (tmp_path / "letter.txt").write_text("dear")
    assert main(arguments) == 2
    assert "holds letter.txt, so it is not tune's" in capsys.readouterr().err
    (tmp_path / "letter.txt").rename(tmp_path / "measurements.jsonl")
    assert main(arguments) == 2
    assert "was measured already: add --resume" in capsys.readouterr().err
    assert (tmp_path / "measurements.jsonl").read_text() == "dear"


def test_what_is_refused_late_leaves_no_folder(model, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(tuning_run, "find", lambda options: model)
    (tmp_path / "a file").touch()
    for option, value, sentence in [
        ("--trials", str(TASKS), "--trials is too small"),
        ("--records", str(tmp_path / "a file"), "a file is no folder"),
    ]:
        folder = tmp_path / "made"
        assert main(["--target", "h200", option, value, "--build-only", str(folder)]) == 2
        assert sentence in capsys.readouterr().err and not folder.exists()


def test_too_few_trials_are_refused(model):
    from bitmtp_tvm.tuning_tasks import budgets, check_trials

    given = budgets([1.0] * TASKS, [len(f.choices) for f in model.found], TASKS)
    with pytest.raises(UsageError, match=f"{TASKS} kernels are the rule's, give more"):
        check_trials(model, given)


def test_a_machine_without_a_card_says_so(tmp_path, capsys):
    """No GPU here; where there is one, it is no Orin."""
    from tuning_folder import plan, task

    found = plan(task())
    text = tune.__name__ and found.__class__(**{**vars(found), "target": "orin", "arch": "sm_87"})
    text.write(tmp_path)
    (tmp_path / "kernels-0.so").write_bytes(b"")
    assert main(["--measure", str(tmp_path)]) == 1
    assert "this needs a machine with a GPU" in capsys.readouterr().err.splitlines()[-1]


def test_the_toolkit_is_asked_for_before_the_work(monkeypatch, checkpoint, tmp_path, capsys):
    def missing():
        raise BitMTPError("NVRTC is not usable")

    monkeypatch.setattr("bitmtp_tvm.toolchain.load_nvrtc", missing)
    arguments = ["--target", "h200", "--model", checkpoint, "--build-only", str(tmp_path / "x")]
    assert main(arguments) == 1
    assert "NVRTC is not usable" in capsys.readouterr().err and not (tmp_path / "x").exists()
    assert nvrtc.INSTALL


def test_help_needs_no_tvm():
    program = (
        "import sys\nfrom bitmtp_tvm import tune\nassert 'tvm' not in sys.modules, 'TVM is loaded'"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
