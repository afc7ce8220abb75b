"""The train command: what a run writes, going on after a kill, several processes, refusals."""

import csv
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from imports import ROOT, modules, names_used, within
from lost_signal import Losing
from safetensors import SafetensorError
from tiny_training import BITNET, MASK, QWEN3, write_text, write_tokenizer

from bitmtp_tvm.checkpoint import open_checkpoint
from bitmtp_tvm.errors import UsageError
from bitmtp_tvm.train import main
from bitmtp_tvm.training import checkpoint, sources
from bitmtp_tvm.training.ablation import read_runs
from bitmtp_tvm.training.checkpoint import load, save
from bitmtp_tvm.training.loop import Run
from bitmtp_tvm.training.model import TrainableDecoder
from bitmtp_tvm.training.options import RECIPES, RUNS, TrainOptions, combined, read_recipe

SHAPE = {k: v for k, v in asdict(replace(BITNET, mtp=None)).items() if k != "vocab_size"}
# 24 steps of 4 windows, and a few numbers that no default has.
COMMON = ["--length", "32", "--micro-batch", "2", "--batch-tokens", "128", "--tokens", "3072"]
COMMON += ["--anchors", "4", "--block-size", "3", "--lr", "3e-3", "--device", "cpu"]
COMMON += ["--log-every", "1", "--validate-every", "10", "--validation-windows", "4"]


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """A child has one thread too, so that sums are the same to the last bit."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Data, tokenizer and the shape of a tiny model."""
    folder = tmp_path_factory.mktemp("train")
    write_text(folder / "code")
    write_tokenizer(folder / "tokenizer.json")
    (folder / "shape.json").write_text(json.dumps(SHAPE))
    return folder


def options(place, output, *more):
    source = [] if "--model" in more else ["--config", str(place / "shape.json")]
    data = ["--data", str(place / "code"), "--tokenizer", str(place / "tokenizer.json")]
    where = ["--cache", str(place / "cache"), "-o", str(output)]
    return [*source, *data, *where, *COMMON, *more]


@pytest.fixture(scope="module")
def trained(place):
    """A whole run that nothing interrupted."""
    output = place / "whole"
    assert main(options(place, output, "--ema", "0.9", "--packed", "--shard-mb", "1")) == 0
    return output


def rows(output, name="train.csv"):
    with (output / name).open() as file:
        return list(csv.DictReader(file))


def losses(output):
    names = ("step", "tokens", "lr", "grad_norm", "loss", "ntp_loss", "mask_ce", "mask_kl")
    return [[row[name] for name in names] for row in rows(output)]


def same_weights(one, two):
    pairs = zip(load(one).named_parameters(), load(two).named_parameters(), strict=True)
    return all(torch.equal(a, b) for (_, a), (_, b) in pairs)


def test_a_run_learns_and_says_what_it_did(trained):
    table = rows(trained)
    assert [int(row["step"]) for row in table] == list(range(1, 25))
    first, last = (float(table[i]["ntp_loss"]) for i in (0, -1))
    assert last < first - 0.5
    validation = rows(trained, "validation.csv")
    assert [int(row["step"]) for row in validation] == [10, 20, 24]
    assert {"ntp_loss", "accuracy_3", "agreement_1", "accepted_length"} <= validation[0].keys()
    result = json.loads((trained / "result.json").read_text())
    assert (result["step"], result["tokens"]) == (24, 3072)
    card = (trained / "README.md").read_text()
    assert f"{float(validation[-1]['ntp_loss']):.4f} nats" in card
    assert "3072 tokens" in card
    assert not list(trained.glob(".*")) and not (trained / "state.pt").exists()
    assert (trained / "loss.png").stat().st_size > 1000


def test_a_ctrl_c_that_was_lost_ends_the_run(place, tmp_path, monkeypatch):
    losing = Losing()
    monkeypatch.setattr(Run, "_one_step", losing)
    monkeypatch.setattr(Run, "_report", lambda run, logs: None)
    assert main(options(place, tmp_path / "out")) == 130 and losing.calls == 1


def test_a_ctrl_c_that_was_lost_ends_tokenising(place, tmp_path, monkeypatch):
    encoded, losing = sources._documents, Losing()

    def documents(files):
        for text in encoded(files):
            losing()
            yield text

    monkeypatch.setattr(sources, "_documents", documents)
    monkeypatch.setattr(sources, "_DOCUMENTS_AT_ONCE", 1)
    fresh = ["--cache", str(tmp_path / "cache")]
    assert main([*options(place, tmp_path / "out"), *fresh]) == 130 and losing.calls == 1


def test_the_compiler_reads_what_a_run_writes(trained):
    one, two = open_checkpoint(trained), open_checkpoint(trained / "packed")
    assert one.config.mtp == replace(BITNET.mtp, block_size=3)
    assert one.add_bos and one.eos_token_ids == (257,)
    codes, scale = one.low_bit("layers.1.down_proj")
    others, other = two.low_bit("layers.1.down_proj")
    assert scale == other and np.array_equal(codes, others)
    assert one.tokenizer_json() == two.tokenizer_json() is not None


def test_a_killed_run_goes_on_to_the_same_numbers(place, trained):
    output = place / "killed"
    command = options(place, output, "--ema", "0.9", "--packed", "--shard-mb", "1")
    child = subprocess.Popen(
        [sys.executable, "-m", "bitmtp_tvm.train", *command, "--save-every", "1e-6"],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
    )
    # Far enough for the mean of the weights to be another than the weights.
    while child.poll() is None and not ((output / "train.csv").exists() and len(rows(output)) > 8):
        time.sleep(0.01)
    child.send_signal(signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL, "the run was over before it could be killed"
    assert len(rows(output)) < 24
    assert main([*command, "--resume"]) == 0
    assert losses(output) == losses(trained)
    tables = [rows(run, "validation.csv") for run in (output, trained)]
    for one, other in zip(*tables, strict=True):
        assert {**one, "seconds": ""} == {**other, "seconds": ""}
    assert same_weights(output, trained)


def test_the_mean_of_the_weights_is_what_is_saved(place, tmp_path):
    # A mean that keeps all of what it was is that of the beginning.
    command = options(place, tmp_path / "out", "--ema", "1", "--tokens", "512")
    assert main(command) == 0
    saved = load(tmp_path / "out")
    first = TrainableDecoder(saved.config)
    first.initialise(0)
    for one, two in zip(saved.parameters(), first.parameters(), strict=True):
        assert torch.equal(one, two.bfloat16().float())


def test_a_row_of_the_table_is_whole_though_a_pause_came_between(place, tmp_path):
    few = ["--tokens", "1536", "--log-every", "5"]
    command = options(place, tmp_path / "paused", *few)
    assert main([*command, "--pause-after", "1e-6"]) == 0
    assert main([*command, "--resume"]) == 0
    assert main(options(place, tmp_path / "whole", *few)) == 0
    assert losses(tmp_path / "paused") == losses(tmp_path / "whole")
    assert [row[0] for row in losses(tmp_path / "whole")] == ["5", "10", "12"]


def test_a_run_that_diverges_fails(place, tmp_path, capsys):
    command = options(place, tmp_path / "out", "--lr", "1e30", "--warmup", "0")
    assert main(command) == 1
    assert "try a smaller --lr" in capsys.readouterr().err
    assert not (tmp_path / "out" / "config.json").exists()


def test_what_is_no_run_is_left_alone(place, tmp_path, capsys):
    kept = tmp_path / "out" / "model-old.safetensors"
    kept.parent.mkdir()
    kept.write_text("mine")
    assert main(options(place, kept.parent)) == 2
    assert "model-old.safetensors is none of a run's files" in capsys.readouterr().err
    kept.rename(kept.with_name("train.csv"))
    assert main(options(place, kept.parent)) == 1
    assert "train.csv is no table of a run" in capsys.readouterr().err


def test_a_disk_that_is_full_is_one_line(place, tmp_path, capsys, monkeypatch):
    def full(tensors, path, **_):
        Path(path).write_bytes(b"half")
        raise SafetensorError("No space left on device")

    monkeypatch.setattr(checkpoint, "save_file", full)
    assert main(options(place, tmp_path / "out", "--tokens", "256")) == 1
    assert "model.safetensors cannot be written: No space left" in capsys.readouterr().err
    assert not list((tmp_path / "out").glob(".*"))


def test_a_pause_is_no_end(place, trained):
    output = place / "paused"
    command = options(place, output, "--ema", "0.9")
    assert main([*command, "--pause-after", "1e-6"]) == 0
    assert (output / "state.pt").exists() and not (output / "result.json").exists()
    assert open_checkpoint(output).config.mtp is not None
    assert main(command) == 2, "a run that can go on is not overwritten"
    assert main([*command, "--resume", "--lr", "1e-4"]) == 2
    assert main([*command, "--resume"]) == 0
    assert losses(output) == losses(trained)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_two_processes_with_sharded_parameters_give_the_same_losses(place, optimizer):
    alone, output = place / f"alone-{optimizer}", place / f"two-{optimizer}"
    short = ["--ema", "0.9", "--tokens", "1024", "--save-every", "1e-6", "--optimizer", optimizer]
    assert main(options(place, alone, *short)) == 0
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = options(place, output, *short, "--micro-batch", "1")
    # Muon's momentum lies whole in every process: it must come back that way too.
    for more in [["--pause-after", "1e-6"], ["--resume"]] if optimizer == "muon" else [[]]:
        done = subprocess.run(
            [sys.executable, *launch, "-m", "bitmtp_tvm.train", *command, *more],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr[-2000:]
    ours, theirs = (np.array(losses(o), float) for o in (output, alone))
    assert np.allclose(ours[0], theirs[0], rtol=1e-4)
    # From the second step on sums differ in their last bits, and codes may round the other way.
    assert np.allclose(ours[:, 4:7], theirs[:, 4:7], rtol=1e-2)
    final = [float(rows(o, "validation.csv")[-1]["ntp_loss"]) for o in (output, alone)]
    assert final[0] == pytest.approx(final[1], rel=1e-2)


def test_training_the_mask_token_alone_leaves_clean_rows_as_they_were(place, trained, tmp_path):
    output = tmp_path / "masks"
    command = options(place, output, "--model", str(trained), "--train-only", "masks")
    assert main([*command, "--tokens", "512"]) == 0
    before, after = load(trained), load(output)
    for (name, one), (_, two) in zip(
        before.named_parameters(), after.named_parameters(), strict=True
    ):
        changed = (one != two).nonzero()
        assert not len(changed) or name == "model.embed_tokens.weight"
        assert all(row == MASK for row, _ in changed.tolist())
    table = [model.model.embed_tokens.weight for model in (before, after)]
    assert not torch.equal(*table)
    tokens = torch.arange(30)[None] % 250
    mask = torch.ones(30, 30, dtype=torch.bool).tril()[None, None]
    with torch.no_grad():
        hidden = [model(tokens, torch.arange(30)[None], mask) for model in (before, after)]
        logits = [m.logits(h) for m, h in zip((before, after), hidden, strict=True)]
    assert torch.equal(*hidden)
    # The head is tied: the row is also the mask token's own logit.
    others = torch.arange(logits[0].shape[-1]) != MASK
    assert torch.equal(logits[0][..., others], logits[1][..., others])


@pytest.mark.parametrize("more", [["--optimizer", "muon"], ["--ntp-only"]])
def test_other_ways_to_train(place, tmp_path, more):
    command = options(place, tmp_path / "out", "--activation-checkpointing", *more)
    assert main([*command, "--tokens", "512"]) == 0
    config = open_checkpoint(tmp_path / "out").config
    assert (config.mtp is None) == ("--ntp-only" in more)
    assert len(rows(tmp_path / "out")) == 4


def test_a_budget_in_minutes_ends_with_the_learning_rate(place, tmp_path):
    command = options(place, tmp_path / "out", "--minutes", "0.02")
    at = command.index("--tokens")
    assert main(command[:at] + command[at + 2 :]) == 0
    table = rows(tmp_path / "out")
    assert float(table[-1]["seconds"]) >= 1.2
    assert float(table[-1]["lr"]) < 0.5 * max(float(row["lr"]) for row in table)


def test_a_qwen3_is_trained_by_its_rule(place, tmp_path, capsys):
    shape = {k: v for k, v in asdict(replace(QWEN3, mtp=None)).items() if k != "vocab_size"}
    (tmp_path / "q.json").write_text(json.dumps(shape))
    few = ["--config", str(tmp_path / "q.json"), "--tokens", "384"]
    assert main(options(place, tmp_path / "none", *few)) == 2
    assert "needs --quant" in capsys.readouterr().err
    assert main(options(place, tmp_path / "out", *few, "--quant", "ternary-g128")) == 0
    more = ["--model", str(tmp_path / "out"), "--tokens", "256"]
    assert main(options(place, tmp_path / "more", *more)) == 0
    assert load(tmp_path / "more").quantizer.name == "ternary-g128"
    assert main(options(place, tmp_path / "other", *more, "--quant-threshold", "0.7")) == 0
    assert load(tmp_path / "other").quantizer.threshold == 0.7


def test_runs_of_a_file_give_a_table(place, tmp_path, capsys):
    runs = {"base": {"tokens": 256}, "runs": {"joint": {}, "next only": {"ntp_only": True}}}
    (tmp_path / "runs.json").write_text(json.dumps(runs))
    command = options(place, tmp_path / "out", "--runs", str(tmp_path / "runs.json"))
    command = [w for w in command if w not in ("--tokens", "3072")]
    assert main(command) == 0
    table = (tmp_path / "out" / "ablation.md").read_text().splitlines()
    assert [line.split(" | ")[0] for line in table[2:]] == ["| joint", "| next only"]
    sheet = rows(tmp_path / "out", "ablation.csv")
    assert sheet[0]["accepted_length"] and not sheet[1]["accepted_length"]
    capsys.readouterr()
    assert main(command) == 0, "what is finished is not trained again"
    assert "step" not in capsys.readouterr().out


def test_shipped_recipes_fit_the_options():
    for path in RECIPES.glob("*.json"):
        if path.stem in RUNS:
            found = read_runs(path.stem, {"output": "out", "data": ("x",)}).values()
            assert len({o.tokens for o in found}) == 1, "runs are compared at equal tokens"
        else:
            found = [combined(read_recipe(path.stem), {"output": "out", "data": ("x",)})]
        for o in found:
            o.check()
            assert not o.batch_tokens % (o.length * o.micro_batch)
            rows_ = o.blocks * (o.block_size or 8)
            assert not o.length % 128 and not rows_ % 128
            values = {"vocab_size": 8192, **o.config}
            from relax_models.config import ModelConfig

            assert ModelConfig.from_dict(values).max_position_embeddings >= o.length


def test_a_window_has_a_block_of_mask_rows_for_eight_tokens():
    found = [TrainOptions(length=length).blocks for length in (2048, 1024, 20, 4)]
    assert found == [256, 128, 2, 1]
    assert TrainOptions(length=2048, anchors=3).blocks == 3


REFUSED = {
    "no budget": (["--tokens", "0"], "--tokens"),
    "two budgets": (["--minutes", "1"], "one of --tokens and --minutes"),
    "uneven batch": (["--micro-batch", "3"], "is no multiple of"),
    "no GPU": (["--device", "cuda"], "sees no GPU"),
    "no data": (["--data", "nowhere"], "nowhere is not there"),
    "too long": (["--length", "128"], "the model serves 64"),
    "no place for a block": (["--block-size", "40"], "no longer than a block"),
    "a mask outside": (["--mask-token-id", "9999"], "outside the 259 rows"),
    "nothing to resume": (["--resume"], "nothing to resume"),
    "quant": (["--quant", "ternary-g128"], "a BitNet has its own rule"),
    "masks": (["--train-only", "masks"], "needs --model"),
    "no model": (["--model", "nowhere"], "nowhere is no checkpoint: it has no config.json"),
    "no number": (["--mtp-weight", "nan"], "--mtp-weight is nan"),
    "no end of it": (["--lr", "inf"], "--lr is inf"),
    "a seed": (["--seed", "-1"], "--seed is -1; it must not be negative"),
    "no masks": (["--anchors", "0"], "say --ntp-only"),
    "fewer than none": (["--anchors", "-1"], "--anchors is -1; it must not be negative"),
    "more than all": (["--kl-share", "1.5"], "--kl-share is 1.5; it must lie between 0 and 1"),
    "recipe": (["--recipe", "nonsense"], "neither a file nor one of: demo"),
    "output": (["--clip", "-1"], "must be above 0"),
    "more blocks than tokens": (["--anchors", "33"], "--anchors is 33; it must be at most 32"),
    "a large seed": (["--seed", str(1 << 63)], "it must be at most"),
    "less than a step": (["--tokens", "127"], "is less than one step, --batch-tokens 128"),
    "a threshold": (["--quant-threshold", "0.5"], "--quant-threshold is for a Qwen3"),
    "two files": (["--runs", "steps", "--recipe", "demo"], "one of --runs and --recipe"),
    "no runs": (["--runs", "nonsense"], "neither a file nor one of: ablation, steps"),
    "no validation": (["--validation-data", "nowhere"], "--validation-data: nowhere is not there"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_one_line(place, tmp_path, capsys, name):
    if torch.cuda.is_available() and name == "no GPU":
        pytest.skip("there is one")
    more, reason = REFUSED[name]
    try:
        code = main(options(place, tmp_path / "out", *more))
    except SystemExit as end:
        code = end.code
    shown = capsys.readouterr().err
    assert code in (1, 2)
    assert reason in shown
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("shape", "reason"),
    [
        ({"intermediate_size": 42}, "--packed: matrices of 42 rows, not a multiple of 4"),
        ({"intermediate_size": 131072}, "rows of 131072 are too long"),
    ],
)
def test_a_shape_that_does_not_fit_is_refused_before_anything_is_trained(
    place, tmp_path, capsys, shape, reason
):
    (tmp_path / "shape.json").write_text(json.dumps({**SHAPE, **shape}))
    command = options(place, tmp_path / "out", "--packed")
    command[command.index("--config") + 1] = str(tmp_path / "shape.json")
    assert main(command) == 2
    assert reason in capsys.readouterr().err and not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["", "..", "a/b", "tokens", "ablation.md"])
def test_the_name_of_a_run_is_that_of_a_folder_of_its_own(tmp_path, name):
    (tmp_path / "runs.json").write_text(json.dumps({"runs": {name: {}}}))
    given = {"output": tmp_path / "out", "data": ("x",), "preset": "bitnet-2b", "minutes": 1.0}
    with pytest.raises(UsageError, match="is no name"):
        read_runs(str(tmp_path / "runs.json"), given)


def test_what_sets_a_run_apart_is_not_undone(tmp_path):
    runs = {"base": {"tokens": 10**6}, "runs": {"a": {}, "b": {"minutes": 2.0}}}
    (tmp_path / "runs.json").write_text(json.dumps(runs))
    given = {"output": tmp_path / "out", "data": ("x",), "preset": "bitnet-2b"}
    for more in ({}, {"tokens": 2 * 10**6}):
        found = read_runs(str(tmp_path / "runs.json"), {**given, **more})
        assert (found["b"].minutes, found["b"].tokens) == (2.0, None)
        assert found["a"].tokens == more.get("tokens", 10**6)


def test_a_tokenizer_without_mask_token_needs_an_id(place, tmp_path, capsys):
    other = write_tokenizer(tmp_path / "tokenizer.json", mask=False)
    assert main(options(place, tmp_path / "out", "--tokenizer", str(other))) == 2
    assert "give --mask-token-id" in capsys.readouterr().err


def test_a_tokenizer_of_another_model_is_refused(place, tmp_path, capsys):
    from tiny_training import model_of

    small = model_of(replace(BITNET, vocab_size=100, mtp=None))
    save(small, tmp_path / "small")
    assert main(options(place, tmp_path / "out", "--model", str(tmp_path / "small"))) == 1
    assert "the tokenizer belongs to another model" in capsys.readouterr().err


def test_an_unknown_option_in_a_recipe_is_refused(place, tmp_path, capsys):
    for values, reason in [
        ({"lerning_rate": 1}, "there is no option 'lerning_rate'"),
        ({"lr": "fast"}, "lr is 'fast'; expected float"),
    ]:
        (tmp_path / "r.json").write_text(json.dumps(values))
        assert main(options(place, tmp_path / "out", "--recipe", str(tmp_path / "r.json"))) == 2
        assert reason in capsys.readouterr().err


def test_options_on_the_command_line_replace_those_of_a_recipe():
    recipe = {"preset": "bitnet-2b", "tokens": 5, "lr": 2.0}
    both = combined(recipe, {"model": "x", "minutes": 1.0})
    assert both == TrainOptions(model="x", minutes=1.0, lr=2.0)


def test_only_training_evaluation_and_peers_import_torch():
    found = {
        module
        for module, path in modules("bitmtp_tvm").items()
        for name in names_used(path.read_text(), module, path.name == "__init__.py")
        if within(name, {"torch"})
    }
    allowed = {"bitmtp_tvm.training", "bitmtp_tvm.evaluation", "bitmtp_tvm.train"}
    allowed |= {"bitmtp_tvm.peer", "bitmtp_tvm.peer_model"}
    assert not {module for module in found if not within(module, allowed)}


def test_training_imports_no_tvm():
    """It runs where TVM is not installed: what it imports, all told, has none of it."""
    code = "import sys, bitmtp_tvm.train, bitmtp_tvm.plotting\n"
    code += "import bitmtp_tvm.training.ablation, bitmtp_tvm.training.loop\n"
    code += "print([m for m in sys.modules if m.split('.')[0] in ('tvm', 'tvm_ffi', 'gguf')])"
    shown = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert shown.stdout.strip() == "[]", shown.stderr
