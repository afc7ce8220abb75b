"""The peer of `bench --steps` computes what Transformers does; what it lacks is said at once."""

import json
import sys
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from model_manifest import model

from bitmtp_tvm import bench as command
from bitmtp_tvm import bench_steps
from bitmtp_tvm.errors import BitMTPError, UsageError
from bitmtp_tvm.peer import (
    PeerTimes,
    captured,
    check_peer,
    measure_peer,
    peer_lines,
    peer_widths,
    replays,
    shown_peer,
)
from bitmtp_tvm.peer_model import PIECES, CachedForward, build_model, compiled_pieces
from bitmtp_tvm.step_times import GRAPH, LAUNCHES, Timing
from relax_models.config import ModelConfig, YarnConfig

BITNET = ModelConfig(
    architecture="bitnet",
    vocab_size=61,
    hidden_size=96,
    intermediate_size=100,
    num_hidden_layers=3,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=16,
    rms_norm_eps=1e-5,
    rope_theta=500000.0,
    max_position_embeddings=64,
    hidden_act="relu2",
    tie_word_embeddings=True,
)
# Queries are wider than the hidden states; YaRN; a head of its own.
QWEN3 = replace(
    BITNET,
    architecture="qwen3",
    hidden_size=128,
    intermediate_size=256,
    num_attention_heads=8,
    head_dim=32,
    rms_norm_eps=1e-6,
    max_position_embeddings=4096,
    hidden_act="silu",
    tie_word_embeddings=False,
    weight_format="ternary-g128",
    rope_scaling=YarnConfig(factor=4.0, original_max_position_embeddings=1024),
)
MODELS = pytest.mark.parametrize("config", [BITNET, QWEN3], ids=["bitnet", "qwen3"])
HELD = 9


@pytest.fixture(autouse=True)
def fresh_programs():
    """PyTorch keeps a few compiled programs of a function, whatever model they are of."""
    torch.compiler.reset()


def spread(config, device="cpu", dtype=torch.float32):
    """A model whose parameters all differ, as a manifest has its configuration."""
    torch.manual_seed(3)
    found = build_model(config.to_dict(), device, dtype)
    with torch.no_grad():
        for parameter in found.parameters():
            parameter += torch.randn_like(parameter) / 8
    return found


@MODELS
@torch.no_grad()
def test_rows_behind_a_cache_are_those_of_a_whole_forward(config):
    whole = spread(config)
    programs = []
    compiled = compiled_pieces(backend=lambda p, _: programs.append(p) or p, fullgraph=True)
    forward = CachedForward(whole, HELD + 3)
    for width in (1, 3):
        forward.prefill(HELD)
        wanted = whole(forward.rows(HELD + width, 0)[0]).logits[:, HELD:]
        for pieces in (PIECES, compiled):
            # Another test may have switched compiling off for the process.
            with torch.compiler.set_stance("default"):
                logits, best = forward(*forward.rows(width, HELD), pieces)
            torch.testing.assert_close(logits, wanted, rtol=1e-4, atol=1e-4)
            assert best.tolist() == wanted.argmax(-1).tolist()
    assert len(set(best.flatten().tolist())) > 1
    # One program serves all three layers: what enters, a layer and what leaves, at two widths.
    assert len(programs) == 6


@MODELS
def test_the_model_has_the_shape_of_the_configuration(config):
    found = build_model(config.to_dict(), "cpu", torch.bfloat16)
    assert {p.dtype for p in found.parameters()} == {torch.bfloat16}
    tied = found.lm_head.weight is found.model.embed_tokens.weight
    assert tied == config.tie_word_embeddings
    shape = found.config
    assert shape.rope_parameters["rope_theta"] == config.rope_theta
    assert shape.rope_parameters["rope_type"] == ("yarn" if config.rope_scaling else "default")
    layer = found.model.layers[-1]
    assert layer.self_attn.q_proj.weight.shape == (config.query_width, config.hidden_size)
    assert layer.mlp.down_proj.weight.shape == (config.hidden_size, config.intermediate_size)
    assert len(found.model.layers) == 3 and shape.rms_norm_eps == config.rms_norm_eps


def test_the_cache_has_room_in_whole_blocks():
    found = build_model(BITNET.to_dict(), "cpu", torch.float32)
    assert [CachedForward(found, tokens).room for tokens in (1, 64, 65)] == [64, 64, 128]


def test_the_narrowest_and_the_widest_that_decodes_are_compared():
    assert peer_widths((1, 2, 4, 8, 16)) == (1, 8)
    assert peer_widths((1, 4, 16)) == (1, 4)
    assert peer_widths((1,)) == (1,)
    assert peer_widths((16, 32)) == (16,)


OURS = {1: Timing(0.5, 0.4, 0.6), 4: Timing(0.8, 0.8, 0.9), 16: Timing(1, 1, 1)}
PEER = PeerTimes(
    "BitNetForCausalLM",
    {"torch": "2.11.0", "transformers": "5.17.0"},
    576,
    {1: Timing(3.4, 3.39, 3.5), 4: Timing(4.0, 3.9, 4.1)},
)


def test_the_peer_stands_beside_our_step():
    who, how, _, *rows = peer_lines(PEER, OURS)
    assert "Transformers 5.17.0 on PyTorch 2.11.0: BitNetForCausalLM" in who
    assert "dense bfloat16 weights, activations not quantised" in how and "576 tokens" in how
    assert [row.split() for row in rows] == [
        "1 3.400 ms (3.390-3.500) 6.80 x".split(),
        "4 4.000 ms (3.900-4.100) 5.00 x".split(),
    ]
    found = json.loads(json.dumps(shown_peer(PEER, OURS)))
    assert found["milliseconds"] == {"1": [3.4, 3.39, 3.5], "4": [4.0, 3.9, 4.1]}
    assert found["times_ours"] == {"1": 6.8, "4": 5.0}
    assert found["name"] == "transformers" and found["cache_tokens"] == 576


@pytest.fixture
def bench(monkeypatch, tmp_path, capsys):
    """`bench --steps --peer transformers` of a model for a target, everything measured made up."""
    asked = []

    def run(target, *more):
        manifest = model(target, widths=tuple(OURS))
        found = SimpleNamespace(directory=tmp_path, manifest=manifest)
        monkeypatch.setattr(bench_steps, "open_artifact", lambda directory: found)
        arguments = ["--artifact", str(tmp_path), "--steps", "--peer", "transformers", *more]
        return command.main(arguments), *capsys.readouterr()

    facts = {"device": "a GPU", "device_state": {}, "context_fill": 512}
    floor = {"floor_ms": 0.25, "weight_bytes": 1, "kv_bytes": 1, "data_sheet_gbs": 4800}
    monkeypatch.setattr(bench_steps, "check_device", lambda artifact: None)
    monkeypatch.setattr(bench_steps, "_measure", lambda artifact, graph, fill: OURS)
    monkeypatch.setattr(bench_steps, "measured_facts", lambda *_: facts)
    monkeypatch.setattr(bench_steps, "reading_floor", lambda *_: floor)
    monkeypatch.setattr(bench_steps, "measure_peer", lambda *a: asked.append(a) or PEER)
    run.asked = asked
    return run


def test_the_peer_is_measured_in_the_same_run(bench, monkeypatch):
    monkeypatch.setattr(bench_steps, "check_peer", lambda graphs: None)
    code, out, err = bench("h200", "--fill", "300")
    assert (code, err) == (0, "")
    ((config, widths, fill),) = bench.asked
    assert widths == (1, 4) and fill == 300 and config["hidden_size"] == 2560
    *printed, last = out.splitlines()
    assert printed[-5:] == peer_lines(PEER, OURS)
    report = json.loads(last)
    assert report["peer"] == shown_peer(PEER, OURS) and report["milliseconds"].keys() == {
        GRAPH,
        LAUNCHES,
    }


@pytest.mark.parametrize("arguments", [("cpu",), ("h200", "--no-graph")])
def test_a_peer_needs_steps_that_run_as_cuda_graphs(bench, arguments):
    code, out, err = bench(*arguments)
    assert (code, out) == (2, "") and not bench.asked
    assert err.startswith("error: --peer runs as a CUDA graph, and so must the model beside it: ")


@pytest.mark.parametrize("gone", ["torch", "transformers"])
def test_what_is_not_installed_is_named_before_the_work(bench, monkeypatch, gone):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    check_peer(True)
    monkeypatch.setitem(sys.modules, gone, None)
    code, out, err = bench("h200")
    assert (code, out) == (1, "") and not bench.asked
    assert err.count("\n") == 1 and "needs PyTorch with CUDA and transformers (" in err
    assert f"{gone} " in err.partition("(")[2] and err.endswith("'bitmtp-tvm[peer]'\n")


def test_a_pytorch_without_cuda_is_named_before_the_work(bench, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    code, out, err = bench("h200")
    assert (code, out) == (1, "") and not bench.asked
    assert f"PyTorch {torch.__version__} finds no GPU here" in err


def test_what_pytorch_cannot_do_is_one_line(monkeypatch):
    def no_memory(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried much.\nMore of it")

    monkeypatch.setattr("bitmtp_tvm.peer_model.build_model", no_memory)
    with pytest.raises(BitMTPError) as raised:
        measure_peer(BITNET.to_dict(), (1,), 8)
    assert not isinstance(raised.value, UsageError)
    assert str(raised.value) == (
        "Transformers' model could not be measured: CUDA out of memory. Tried much."
    )


@pytest.mark.gpu
@MODELS
@torch.no_grad()
def test_what_is_replayed_is_the_whole_forward(config):
    """The graph of the compiled pieces, in float32, at both ends of the widths."""
    whole = spread(config, "cuda")
    forward = CachedForward(whole, HELD + 8)
    pieces = compiled_pieces(fullgraph=True)
    for width in (1, 8):
        forward.prefill(HELD)
        wanted = whole(forward.rows(HELD + width, 0)[0]).logits[:, HELD:]
        graph, (logits, best) = captured(partial(forward, *forward.rows(width, HELD), pieces))
        logits.zero_()
        assert min(replays(graph)) > 0
        torch.testing.assert_close(logits, wanted, rtol=1e-2, atol=1e-2)
        assert best.tolist() == logits.argmax(-1).tolist()


@pytest.mark.gpu
@MODELS
def test_a_peer_is_measured_on_the_gpu(config):
    found = measure_peer(config.to_dict(), (1, 8), 32)
    assert (
        found.model == {"bitnet": "BitNet", "qwen3": "Qwen3"}[config.architecture] + "ForCausalLM"
    )
    assert found.times.keys() == {1, 8} and found.room == 64
    assert all(0 < t.low <= t.median <= t.high for t in found.times.values())
