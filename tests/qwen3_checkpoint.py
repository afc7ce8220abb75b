"""Qwen3 checkpoints as transformers writes them, and transformers' own model of them.

Everything that a loader could mix up differs: scales from group to group, norms from element to
element, q norms from k norms.
"""

from pathlib import Path

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

# Grouped queries, a head as wide as the groups are not, no row count a multiple of 8.
TIED = {
    "vocab_size": 61,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 64,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "tie_word_embeddings": True,
}
# The queries are wider than the hidden states, as in the 4B model; YaRN; a head of its own.
UNTIED = {
    "vocab_size": 83,
    "hidden_size": 256,
    "intermediate_size": 640,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 1000000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 1024,
    },
    "tie_word_embeddings": False,
}
DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def exact_scales(generator: torch.Generator, n: int, groups: int) -> torch.Tensor:
    """Scales `(n, groups)` of eight significant bits: exact in bfloat16 and float16."""
    mantissa = torch.randint(128, 256, (n, groups), generator=generator)
    exponent = torch.randint(0, 3, (n, groups), generator=generator)
    return mantissa / 2.0 ** (10 + exponent)


def unpacked(generator: torch.Generator, shape: tuple[int, int], bits: int) -> torch.Tensor:
    """Weights that are ±d, or with two bits -d, 0 or d, with a d for each group of 128."""
    n, k = shape
    signs = torch.randint(-1, 2, (n, k // 128, 128), generator=generator)
    if bits == 1:
        signs = torch.randint(0, 2, (n, k // 128, 128), generator=generator) * 2 - 1
    return (signs * exact_scales(generator, n, k // 128)[..., None]).reshape(n, k)


def write_qwen3(
    directory: Path,
    sizes: dict[str, object],
    seed: int = 0,
    bits: int | None = 2,
    dtype: str = "BF16",
    shard_bytes: int | None = None,
) -> dict[str, np.ndarray]:
    """Write a random checkpoint: unpacked weights of `bits`, or latent ones where that is None.

    Returns the stored values as float32 by their names in the file.
    """
    config = Qwen3Config(**sizes, rms_norm_eps=1e-6, eos_token_id=2, pad_token_id=3)
    config.architectures = ["Qwen3ForCausalLM"]
    model = Qwen3ForCausalLM(config)
    generator = torch.Generator().manual_seed(seed)
    stored: dict[str, torch.Tensor] = {}
    for name, parameter in model.state_dict().items():
        if name == "lm_head.weight" and sizes["tie_word_embeddings"]:
            continue
        if parameter.ndim == 1:
            values = torch.rand(parameter.shape, generator=generator) + 0.5
        elif bits is None:
            values = torch.randn(parameter.shape, generator=generator) / 20
            values *= torch.rand((len(values), 1), generator=generator) + 0.5
        else:
            values = unpacked(generator, tuple(parameter.shape), bits)
        stored[name] = values.to(DTYPES[dtype])
    kept = {name: values.float().numpy() for name, values in stored.items()}
    # It empties the dictionary.
    model.save_pretrained(directory, state_dict=stored, max_shard_size=shard_bytes or "1GB")
    return kept


def load_qwen3(directory: Path) -> Qwen3ForCausalLM:
    """The checkpoint as transformers loads it, in float32."""
    model = Qwen3ForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    )
    return model.eval()


def logits_of(model: Qwen3ForCausalLM, tokens: np.ndarray) -> np.ndarray:
    """Logits `(W, V)` float32 of one causal forward over tokens `(W,)`."""
    with torch.no_grad():
        return model(torch.tensor(tokens)[None].long()).logits[0].float().numpy()
