"""BitNet checkpoints as transformers writes them, and transformers' own model of them.

Everything that a loader could mix up differs: scales from matrix to matrix, norms from element to
element. All values are exact in bfloat16, so a comparison needs no tolerance for the file.
"""

from pathlib import Path
from unittest import mock

import numpy as np
import torch
from transformers import BitNetConfig, BitNetForCausalLM
from transformers.integrations.bitnet import pack_weights

import bitmtp_tvm

DEMO = Path(bitmtp_tvm.__file__).parent / "assets" / "demo"

# No row count is a multiple of 16 and no inner size one of 128; grouped queries.
ODD = {
    "vocab_size": 61,
    "hidden_size": 72,
    "intermediate_size": 100,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "max_position_embeddings": 64,
}
# More than one block of 128 along K.
WIDE = {
    "vocab_size": 80,
    "hidden_size": 136,
    "intermediate_size": 260,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 34,
    "max_position_embeddings": 96,
}
QUANTIZATION = {
    "quant_method": "bitnet",
    "linear_class": "autobitlinear",
    "quantization_mode": "offline",
}


LEGACY = QUANTIZATION | {"linear_class": "bitlinear"}
ONLINE = QUANTIZATION | {"quantization_mode": "online"}


def write_checkpoint(
    directory: Path,
    sizes: dict[str, int],
    seed: int = 0,
    shard_bytes: int | None = None,
    quantization: dict[str, str] | None = QUANTIZATION,
    hidden_act: str = "relu2",
) -> dict[str, np.ndarray]:
    """Write a random checkpoint; `shard_bytes` splits it into shards of at most that size.

    With `quantization` ONLINE or None the weights are master weights. Returns the float32 weights,
    dequantised where they are packed, by their names in the file, without those of the scales.
    """
    more = {} if quantization is None else {"quantization_config": quantization}
    config = BitNetConfig(
        **sizes,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        hidden_act=hidden_act,
        **more,
    )
    config.architectures = ["BitNetForCausalLM"]
    model = BitNetForCausalLM(config)
    generator = torch.Generator().manual_seed(seed)
    stored: dict[str, torch.Tensor] = {}
    dequantised: dict[str, np.ndarray] = {}
    for name, parameter in model.state_dict().items():
        if "_proj." in name and quantization in (ONLINE, None):
            values = torch.randn(parameter.shape, generator=generator)
            stored[name] = (values * (40 + len(stored)) / 1024).bfloat16()
            dequantised[name] = stored[name].float().numpy()
        elif "_proj." in name:
            codes = torch.randint(-1, 2, parameter.shape, generator=generator).float()
            scale = torch.tensor([(40 + len(stored)) / 1024]).bfloat16()
            stored[name] = pack_weights(codes.clone())
            stored[f"{name}_scale"] = scale
            factor = 1 / scale.float() if quantization == LEGACY else scale.float()
            dequantised[name] = (codes * factor).numpy()
        elif name != "lm_head.weight":
            values = torch.rand(parameter.shape, generator=generator) + 0.5
            if "embed" in name:
                values = torch.randn(parameter.shape, generator=generator)
            stored[name] = values.bfloat16()
            dequantised[name] = stored[name].float().numpy()
    model.save_pretrained(directory, state_dict=stored, max_shard_size=shard_bytes or "1GB")
    return dequantised


def load_transformers(directory: Path, dtype: torch.dtype = torch.float32) -> BitNetForCausalLM:
    """The checkpoint as transformers loads it, its AutoBitLinear layers included, in `dtype`."""
    # transformers asks for accelerate, and uses nothing of it here; its torch.compile decorators
    # want a C++ compiler.
    torch.compiler.set_stance("force_eager")
    with mock.patch("transformers.quantizers.quantizer_bitnet.is_accelerate_available"):
        model = BitNetForCausalLM.from_pretrained(
            directory, dtype=torch.float32, attn_implementation="eager"
        )
    # Its own `float()` refuses quantised models, and some tensors keep the type of the file.
    return torch.nn.Module.to(model, dtype).eval()


def transformers_logits(model: BitNetForCausalLM, tokens: np.ndarray) -> np.ndarray:
    """Logits `(W, V)` float32 of one causal forward over tokens `(W,)`.

    Step by step as written: compiled, Transformers' division by the largest value rounds
    differently, and with it now and then an activation.
    """
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        return model(torch.tensor(tokens)[None].long()).logits[0].float().numpy()
