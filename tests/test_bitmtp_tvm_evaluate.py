"""The command: everything over fake models, files and pictures, and what it refuses."""

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from fake_model import FakeModel, hashed, wrong_at
from lost_signal import Losing, ended_at_once
from model_manifest import model as manifest_of
from scored_session import FakeDecoder, ScoredSession, written
from twin_session import CHEAP_ROWS, mtp_of

from bitmtp_tvm import engine as engine_module
from bitmtp_tvm import evaluate as command
from bitmtp_tvm.engine import Parts
from bitmtp_tvm.evaluation import checkpoint, sources
from bitmtp_tvm.evaluation.artifact_rows import ArtifactRows
from bitmtp_tvm.evaluation.held_out import Vocabulary
from bitmtp_tvm.evaluation.progress import counted
from bitmtp_tvm.evaluation.torch_rows import TorchRows
from bitmtp_tvm.manifest import TokenizerInfo

VOCABULARY = Vocabulary(50, None, 0, (48,))


def checkpoints(directory, device, quant, threshold):
    """The checkpoints `joint` and `plain`, whose clean rows are less sure of themselves, and one
    `other` with another vocabulary."""
    found = {
        "joint": FakeModel(200, block_size=4, quality=wrong_at((1,)), sharpness=0.8),
        "plain": FakeModel(200, block_size=4, sharpness=0.81),
        "other": FakeModel(200, 60, block_size=4),
    }
    return TorchRows(FakeDecoder(found[directory.name]), str(directory)), VOCABULARY


def held_out(count):
    """So many documents as the model writes them, without a start or an end token inside."""
    texts = [written(FakeModel(200), 30, first) for first in range(1, 48)]
    whole = [[0, *text] for text in texts if not {0, 48} & set(text)]
    return [token for text in whole[:count] for token in text]


@pytest.fixture
def evaluate(monkeypatch, tmp_path, capsys):
    """The command over a fake artifact and fake checkpoints; gives code, stdout and stderr."""
    monkeypatch.chdir(tmp_path)
    np.array(held_out(8), "<u2").tofile(tmp_path / "text.bin")
    fake = FakeModel(200, quality=hashed(5, 0.8))
    parts = Parts(ScoredSession(fake, depth=2), None, frozenset(), CHEAP_ROWS, mtp_of(fake))
    manifest = manifest_of("cpu")
    config = {**manifest.config, "vocab_size": 50, "mtp": parts.mtp}
    info = TokenizerInfo(None, True, 0, (48,), None)
    manifest = replace(manifest, config=config, widths=parts.session.widths, tokenizer=info)
    opened = SimpleNamespace(manifest=manifest, tokenizer=None)
    monkeypatch.setattr(sources, "open_artifact", lambda directory: opened)
    monkeypatch.setattr(engine_module, "open_parts", lambda directory, progress, graph: parts)
    monkeypatch.setattr(checkpoint, "open_checkpoint_rows", checkpoints)

    def run(*arguments, mtp=True):
        if not mtp:
            opened.manifest = replace(manifest, config={**config, "mtp": None})
        code = command.main([*arguments])
        return code, *capsys.readouterr()

    return run


SMALL = ("--data", "text.bin", "--length", "20", "--anchors", "3", "--windows", "6")
SHORT = ("--completions", "3", "--prompt-tokens", "5", "--max-new-tokens", "20")


def test_an_artifact_is_evaluated(evaluate, tmp_path):
    files = ("--json", "found.json", "--markdown", "found.md", "--plots", "plots")
    code, out, err = evaluate("--artifact", "fake", *SMALL, *SHORT, *files)
    assert code == 0 and "Next token" in out and "Mask rows of fake" in out
    assert out.count("Completions of 20 tokens") == 2
    assert out.splitlines()[-1].startswith("tok/s are those of device ")
    report = json.loads((tmp_path / "found.json").read_text())
    (prediction,) = report["predictions"]
    assert prediction["windows"] == 6 and prediction["tokens"] == 114
    assert prediction["masks"]["anchors"] == 18
    found = [(one["temperature"], one["all"]["mode"]) for one in report["completions"]]
    modes = ("ar", "confidence", "speculative", "hybrid")
    assert found == [(t, mode) for t in (0, 0.8) for mode in modes]
    assert all(
        one["all"]["identical_to_ar"] == 3 and one["all"]["perplexity_against_ar"]["value"] == 1
        for one in report["completions"]
        if one["all"]["mode"] in ("ar", "speculative")
    )
    assert report["seed"] == 0 and report["data"] == ["text.bin"] and report["target"] == "cpu"
    assert report["command"].startswith("python -m bitmtp_tvm.evaluate --artifact fake")
    markdown = (tmp_path / "found.md").read_text()
    assert markdown.startswith("## Evaluation") and "### Next token\n\n| model |" in markdown
    pictures = sorted(path.name for path in (tmp_path / "plots").iterdir())
    assert pictures == ["mask_rows.png", "modes.png", "reliability.png"]
    assert all(name in err for name in pictures)
    assert {path.name for path in tmp_path.iterdir()} == {
        "found.json",
        "found.md",
        "plots",
        "text.bin",
    }


def test_a_ctrl_c_that_was_lost_ends_every_count(capsys):
    losing = Losing()
    assert ended_at_once(lambda: [losing() for _ in counted(range(9), "nine", 9)], losing)


def test_a_ctrl_c_that_was_lost_ends_the_windows(evaluate, monkeypatch):
    losing = Losing(ArtifactRows._clean)
    monkeypatch.setattr(ArtifactRows, "_clean", lambda rows, tokens: losing(rows, tokens))
    assert evaluate("--artifact", "fake", *SMALL, *SHORT)[0] == 130 and losing.calls == 1


def test_two_runs_find_the_same(evaluate, tmp_path):
    def found(name, *more):
        assert evaluate("--artifact", "fake", *SMALL, *SHORT, "--json", name, *more)[0] == 0
        report = json.loads((tmp_path / name).read_text())
        return [
            report["predictions"],
            [(one["all"]["tokens"], one["all"]["perplexity"]) for one in report["completions"]],
        ]

    once = found("a.json", "--modes", "hybrid")
    assert once == found("b.json", "--modes", "hybrid")
    assert len(once[1]) == 4
    assert once[0] != found("c.json", "--modes", "hybrid", "--seed", "1")[0]


def test_a_checkpoint_is_compared_with_a_baseline(evaluate, tmp_path):
    code, out, _ = evaluate(
        "--model", "joint", "--baseline", "plain", *SMALL, "--json", "found.json"
    )
    assert code == 0 and "joint costs" in out and "Completions" not in out
    report = json.loads((tmp_path / "found.json").read_text())
    joint, plain = report["predictions"]
    assert [len(joint["masks"]["accuracy"]), plain["masks"]] == [4, None]
    cost = report["joint_cost"]
    difference = joint["loss"]["value"] - plain["loss"]["value"]
    assert cost["loss_difference"]["value"] == pytest.approx(difference, abs=1e-5)
    assert cost["share"]["value"] == pytest.approx(difference / plain["loss"]["value"], abs=1e-5)


def test_a_checkpoint_scores_the_texts_of_an_artifact(evaluate, tmp_path):
    code, *_ = evaluate(
        *("--model", "joint", "--artifact", "fake", *SMALL, *SHORT),
        *("--windows", "0", "--temperatures", "0", "--modes", "ar", "--json", "found.json"),
    )
    report = json.loads((tmp_path / "found.json").read_text())
    assert code == 0 and report["predictions"] == []
    # The artifact's greedy tokens are the checkpoint's too, which gives each of them 0.8.
    assert report["completions"][0]["all"]["perplexity"]["value"] == pytest.approx(1.25, abs=1e-4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (SMALL, "there is nothing to evaluate: give --model, --artifact or both"),
        (("--artifact", "fake"), "there is no held-out text: give --data, --prompts or"),
        (("--artifact", "fake", "--baseline", "plain", *SMALL), "--baseline is compared with"),
        (("--artifact", "fake", "--human-eval"), "--human-eval runs programs that the model wrote"),
        (("--artifact", "fake", *SMALL, "--execute"), "--execute goes with --human-eval"),
        (("--artifact", "fake", *SMALL, "--problems", "x"), "--problems goes with --human-eval"),
        (("--model", "joint", "--human-eval", "--execute"), "--human-eval is answered by a"),
        (("--model", "joint", "--prompts", "x"), "--prompts is answered by a compiled model"),
        (("--model", "joint", *SMALL, "--windows", "0"), "nothing is left to measure"),
        (
            ("--model", "joint", "--baseline", "plain", "--artifact", "fake", "--prompts", "x"),
            "--baseline is compared on windows of --data",
        ),
        (("--artifact", "fake", *SMALL, "--json", "none/a.json"), "/none is not there"),
        (
            ("--artifact", "fake", *SMALL, "--json", "a", "--markdown", "a"),
            "/a cannot be two files at once",
        ),
        (("--artifact", "fake", *SMALL, "--device", "cpu"), "--device is about --model"),
        (("--artifact", "fake", *SMALL, "--quant", "x"), "--quant is about --model"),
        (
            ("--artifact", "fake", *SMALL, "--modes", "ar", "--layouts", "chain"),
            "--layouts means nothing in mode ar",
        ),
        (("--model", "joint", *SMALL, "--length", "1"), "--length is 1: a window needs"),
        (("--artifact", "fake", *SMALL, "--plots", "text.bin"), "text.bin is no folder"),
        (("--artifact", "fake", *SMALL, "--length", "40"), "the held-out text, 248 tokens, has no"),
        (("--artifact", "fake", *SMALL, "--length", "4"), "windows of 4 tokens have no room for 8"),
        (("--artifact", "fake", *SMALL, "--length", "201"), "windows of 201 tokens do not fit"),
        (("--artifact", "fake", *SMALL, "--block-sizes", "9"), "block_size is 9 and the model"),
        (("--artifact", "fake", "--data", "none.bin", "--length", "20"), "none.bin cannot be read"),
        (("--artifact", "fake", "--prompts", "none"), "none cannot be read"),
        (("--artifact", "fake", *SMALL, *SHORT, "--temperatures", "-1"), "temperature is -1.0"),
        (("--model", "joint", "--baseline", "other", *SMALL), "joint has a vocabulary of 50 and"),
        (("--model", "other", "--artifact", "fake", *SMALL), "other has a vocabulary of 60 and"),
    ],
)
def test_what_cannot_be_evaluated_is_refused(evaluate, arguments, message, tmp_path):
    code, out, err = evaluate(*arguments)
    assert code in (1, 2) and out == ""
    assert err.startswith("error: ") and message in err and err.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["text.bin"]


def test_prompts_that_leave_no_room_are_refused_before_the_work(evaluate, tmp_path):
    np.full(600, 7, np.uint16).tofile(tmp_path / "long.bin")
    text = ("--data", "long.bin", "--length", "20", "--anchors", "3")
    code, out, err = evaluate("--artifact", "fake", *text, "--prompt-tokens", "200")
    assert code == 2 and out == "" and "leaves no room in a context of 200" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--modes", "fast"), "'fast' is no mode: choose of ar, confidence"),
        (("--windows", "-1"), "'-1' is not a whole number of at least 0"),
        (("--temperatures", "warm"), "'warm' is not a temperature such as 0.8"),
    ],
)
def test_what_no_option_takes_is_refused(arguments, message, capsys):
    with pytest.raises(SystemExit) as end:
        command.main(["--artifact", "fake", *arguments])
    assert end.value.code == 2 and message in capsys.readouterr().err


def test_a_model_without_mask_rows_has_one_mode(evaluate, tmp_path):
    found = evaluate("--artifact", "fake", *SMALL, *SHORT, "--modes", "hybrid", mtp=False)
    assert found[0] == 2 and "fake was trained without multi-token prediction" in found[2]
    code, out, _ = evaluate("--artifact", "fake", *SMALL, *SHORT, "--json", "a.json", mtp=False)
    assert code == 0 and "Mask rows" not in out
    report = json.loads((tmp_path / "a.json").read_text())
    assert [one["all"]["mode"] for one in report["completions"]] == ["ar", "ar"]
