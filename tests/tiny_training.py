"""Tiny models, a tokenizer and text for the tests of training."""

from dataclasses import replace
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from bitmtp_tvm.training.model import TrainableDecoder
from relax_models.config import ModelConfig, MTPConfig, YarnConfig

BOS, EOS, MASK = 256, 257, 258
VOCABULARY = 259
BITNET = ModelConfig(
    architecture="bitnet",
    vocab_size=VOCABULARY,
    hidden_size=40,
    intermediate_size=72,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=12,
    rms_norm_eps=1e-5,
    rope_theta=10000.0,
    max_position_embeddings=64,
    hidden_act="relu2",
    tie_word_embeddings=True,
    mtp=MTPConfig(3, MASK),
)
BITNET_SILU = replace(BITNET, hidden_act="silu")
QWEN3 = ModelConfig(
    architecture="qwen3",
    vocab_size=VOCABULARY,
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    rms_norm_eps=1e-6,
    rope_theta=10000.0,
    max_position_embeddings=64,
    hidden_act="silu",
    tie_word_embeddings=True,
    weight_format="ternary-g128",
    mtp=MTPConfig(3, MASK),
)
QWEN3_UNTIED = replace(
    QWEN3, tie_word_embeddings=False, rope_scaling=YarnConfig(4.0, 32), weight_format="binary-g128"
)


def model_of(config: ModelConfig, quant: str | None = None, seed: int = 3) -> TrainableDecoder:
    """Random weights with a different scale for every matrix and row, norms that are not 1."""
    model = TrainableDecoder(config, quant)
    model.initialise(seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for i, parameter in enumerate(model.parameters()):
            if parameter.ndim == 1:
                parameter.copy_(torch.rand(parameter.shape, generator=generator) + 0.5)
            else:
                parameter *= 1 + 0.1 * i
                parameter *= torch.rand((len(parameter), 1), generator=generator) + 0.5
    return model


def causal(length: int) -> torch.Tensor:
    """A plain causal mask `(1, 1, length, length)`."""
    return torch.ones(length, length, dtype=torch.bool).tril()[None, None]


def write_tokenizer(path: Path, mask: bool = True) -> Path:
    """A tokenizer.json of single bytes and the special tokens; returns its path."""
    alphabet = sorted(ByteLevel.alphabet())
    tokenizer = Tokenizer(BPE({word: i for i, word in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    names = ["<|bos|>", "<|eos|>", "<|mask|>"][: 3 if mask else 2]
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in names])
    path.parent.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(path))
    return path


def write_text(folder: Path, documents: int = 60) -> Path:
    """Python files that repeat themselves; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for i in range(documents):
        lines = [f"def f{i}_{j}(x):\n    return x + {j}\n" for j in range(3 + i % 4)]
        (folder / f"m{i:03d}.py").write_text("\n".join(lines))
    return folder
