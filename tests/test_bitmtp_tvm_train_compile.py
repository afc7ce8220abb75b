"""From text to tokens: a model that is trained here, compiled for this processor, and run."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_training import BITNET, BOS, causal, write_text, write_tokenizer

from bitmtp_tvm import Engine
from bitmtp_tvm.artifact import open_artifact
from bitmtp_tvm.compile import main as compile_command
from bitmtp_tvm.session import Session
from bitmtp_tvm.train import main as train_command
from bitmtp_tvm.training.checkpoint import load

pytestmark = pytest.mark.slow
SHAPE = replace(BITNET, hidden_size=128, intermediate_size=256, head_dim=32)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The trained checkpoint and its artifact."""
    folder: Path = tmp_path_factory.mktemp("made")
    values = asdict(replace(SHAPE, mtp=None))
    (folder / "shape.json").write_text(json.dumps(values))
    tokenizer = write_tokenizer(folder / "tokenizer.json")
    data = ["--data", str(write_text(folder / "code", 100)), "--tokenizer", str(tokenizer)]
    model = ["--config", str(folder / "shape.json"), "-o", str(folder / "model")]
    how = ["--length", "48", "--micro-batch", "8", "--batch-tokens", "384", "--tokens", "60k"]
    how += ["--anchors", "4", "--block-size", "4", "--lr", "5e-3", "--device", "cpu"]
    assert train_command([*model, *data, *how]) == 0
    where = ["--model", str(folder / "model"), "-o", str(folder / "artifact")]
    assert compile_command(["--target", "cpu", "--widths", "1,2,4,8", *where]) == 0
    return folder


def test_logits_are_those_that_were_trained(made):
    model, session = load(made / "model"), Session(open_artifact(made / "artifact"))
    tokens = np.array([BOS, *b"def f1_0(x):\n    return x"], np.int32)
    tokens = tokens[: len(tokens) // 8 * 8]
    found = []
    for at in range(0, len(tokens), 8):
        session.decode(tokens[at : at + 8], range(at, at + 8), at, None, range(8))
        found.append(session.logits().copy())
    rows = torch.from_numpy(tokens).long()[None]
    with torch.no_grad():
        hidden = model(rows, torch.arange(len(tokens))[None], causal(len(tokens)))
        theirs = model.logits(hidden)[0].numpy()
    apart = np.abs(np.concatenate(found) - theirs).max(-1) / theirs.std()
    # Keys and values are float16 in the cache, so a code may round the other way.
    assert np.median(apart) < 0.05 and apart.max() < 0.4
    same = np.concatenate(found).argmax(-1) == theirs.argmax(-1)
    assert same.mean() >= 0.9


def test_its_mask_rows_draft_what_it_writes(made):
    engine = Engine(made / "artifact")
    results = {
        mode: engine.generate("def f1_0(", max_new_tokens=40, mode=mode).result()
        for mode in ("ar", "speculative")
    }
    assert results["ar"].token_ids == results["speculative"].token_ids
    assert "return" in results["ar"].text
    assert results["speculative"].stats.accepted_length > 1.1
