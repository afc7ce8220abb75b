"""Training on a GPU: exact products, compiled graphs against plain ones, a run that goes on."""

import csv
import json
from dataclasses import asdict, replace
from functools import partial

import pytest
import torch
from tiny_training import BITNET, BOS, EOS, MASK, model_of, write_text, write_tokenizer

from bitmtp_tvm.train import main
from bitmtp_tvm.training import low_bit
from bitmtp_tvm.training.model import TrainableDecoder
from bitmtp_tvm.training.objective import Objective, Weights, counts
from bitmtp_tvm.training.packing import document_numbers, pack
from relax_models.config import ModelConfig, MTPConfig
from relax_models.quantizers import QUANTIZERS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch sees no GPU"),
]
# Five query heads share a KV head, as in the recipe of the demo.
SHAPE = replace(
    BITNET,
    hidden_size=640,
    intermediate_size=1792,
    num_attention_heads=10,
    num_key_value_heads=2,
    head_dim=64,
    max_position_embeddings=512,
    mtp=MTPConfig(8, MASK),
)


def packed_of(device, flex, seed=0, kind="causal"):
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, BOS, (4, 257), generator=generator)
    tokens[:, 0], tokens[1:, 99], tokens[1:, 100] = BOS, EOS, BOS
    anchors = torch.stack([torch.randperm(248, generator=generator)[:32] for _ in range(4)])
    tokens, anchors = tokens.to(device), anchors.sort().values.to(device)
    return pack(
        tokens,
        anchors,
        8,
        kind,
        mask_token_id=MASK,
        documents=document_numbers(tokens, BOS, EOS),
        flex=flex,
    )


def test_bfloat16_products_are_the_integer_sums():
    q = torch.randint(-128, 128, (300, 1792), device="cuda")
    w = torch.randint(-1, 2, (640, 1792), device="cuda")
    exact = q.double() @ w.double().T
    got = low_bit.product(q.bfloat16(), w.bfloat16(), False, True)
    assert got.dtype == torch.float32
    assert torch.equal(got.double(), exact)


@pytest.mark.parametrize("compiled", [False, True])
def test_codes_and_scales_are_those_of_the_processor(compiled):
    torch.manual_seed(0)
    w, x = torch.randn(640, 512) * 0.02, torch.randn(700, 512) * torch.rand(700, 1)
    rules = [low_bit.ternary_matrix, low_bit.quantise_rows]
    rules += [partial(low_bit.group_weights, quantizer=q) for q in QUANTIZERS.values()]
    for rule, value in zip(rules, [w, x, w, w, w], strict=True):
        work = torch.compile(rule, dynamic=False) if compiled else rule
        for ours, theirs in zip(work(value.cuda()), rule(value), strict=True):
            assert torch.equal(ours.cpu(), theirs)


def losses_and_gradients(model, device, compiled, flex, kind):
    model = model.to(device)
    objective = Objective(model, Weights(), compiled)
    if compiled:
        for layer in model.model.layers:
            layer.compile(dynamic=False, fullgraph=True)
    found = []
    for seed in range(2):
        packed = packed_of(device, flex, seed, kind)
        loss, parts = objective(packed, counts(packed, objective.weights))
        loss.backward()
        found.append(parts.cpu())
    gradients = {name: p.grad.cpu() for name, p in model.named_parameters()}
    return torch.stack(found), gradients


@pytest.mark.parametrize("kind", ["causal", "bidirectional"])
def test_compiled_flex_attention_gives_the_losses_of_the_dense_mask(kind, monkeypatch):
    monkeypatch.setattr(torch._dynamo.config, "error_on_recompile", True)
    torch.compiler.reset()
    ours, one = losses_and_gradients(bfloat16(model_of(SHAPE)), "cuda", True, True, kind)
    theirs, two = losses_and_gradients(bfloat16(model_of(SHAPE)), "cuda", False, False, kind)
    wide, _ = losses_and_gradients(model_of(SHAPE), "cpu", False, False, kind)
    assert torch.allclose(ours[:, :3], theirs[:, :3], rtol=1e-2)
    assert torch.allclose(ours[:, 3], theirs[:, 3], rtol=1e-1)
    # Attention and the head are in bfloat16 there, and in float32 on the processor.
    assert torch.allclose(ours[:, :3], wide[:, :3], rtol=2e-2)
    for name, gradient in two.items():
        similar = torch.nn.functional.cosine_similarity(
            one[name].flatten(), gradient.flatten(), dim=0
        )
        assert similar > 0.95, name


def bfloat16(model: TrainableDecoder) -> TrainableDecoder:
    model.linears.dtype = torch.bfloat16
    return model


def test_a_run_learns_pauses_and_goes_on(tmp_path):
    write_text(tmp_path / "code", 200)
    config: ModelConfig = replace(SHAPE, mtp=None)
    (tmp_path / "shape.json").write_text(json.dumps(asdict(config)))
    tokenizer = write_tokenizer(tmp_path / "tokenizer.json")
    command = ["--config", str(tmp_path / "shape.json"), "--data", str(tmp_path / "code")]
    command += ["--tokenizer", str(tokenizer), "-o", str(tmp_path / "out"), "--device", "cuda"]
    command += ["--length", "256", "--anchors", "32", "--micro-batch", "8"]
    command += ["--batch-tokens", "4096", "--tokens", "400k", "--log-every", "1", "--packed"]
    command += ["--validation-windows", "8", "--validate-every", "40", "--lr", "3e-3"]
    assert main([*command, "--pause-after", "0.001"]) == 0
    assert (tmp_path / "out" / "state.pt").exists()
    assert main([*command, "--resume"]) == 0
    with (tmp_path / "out" / "train.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [int(row["step"]) for row in rows] == list(range(1, 99))
    assert float(rows[-1]["ntp_loss"]) < 0.5 * float(rows[0]["ntp_loss"])
