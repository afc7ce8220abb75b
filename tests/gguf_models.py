"""Tiny BitNet and Qwen3 models as GGUF files: random weights, distinct scales everywhere.

Each comes with its truth: our tensor names to dequantised float32 weights, as the file means them.
"""

from functools import cache

import numpy as np
from gguf_blocks import TYPES, encode
from gguf_bytes import GGUF, Tensor
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

Truth = dict[str, np.ndarray]

ROWS = 400
SIZES = {
    "embedding_length": 256,
    "feed_forward_length": 512,
    "block_count": 2,
    "context_length": 96,
}
BITNET_HEADS = {"head_count": 4, "head_count_kv": 2}
QWEN3_HEADS = {"head_count": 2, "head_count_kv": 1, "key_length": 128, "value_length": 128}
MATRICES = {
    "attn_q": ("q_proj", 256, 256),
    "attn_k": ("k_proj", 128, 256),
    "attn_v": ("v_proj", 128, 256),
    "attn_output": ("o_proj", 256, 256),
    "ffn_gate": ("gate_proj", 512, 256),
    "ffn_up": ("up_proj", 512, 256),
    "ffn_down": ("down_proj", 256, 512),
}
BITNET_NORMS = {
    "attn_norm": ("input_norm", 256),
    "attn_sub_norm": ("attn_sub_norm", 256),
    "ffn_norm": ("post_attention_norm", 256),
    "ffn_sub_norm": ("ffn_sub_norm", 512),
}
QWEN3_NORMS = {
    "attn_norm": ("input_norm", 256),
    "attn_q_norm": ("q_norm", 128),
    "attn_k_norm": ("k_norm", 128),
    "ffn_norm": ("post_attention_norm", 256),
}
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEXT = "the quick brown fox: 12345 jumps over don't I'll it's\n\n  naïve café 漢字 print(x) \t end "
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def bitnet(
    kind: str = "I2_S", architecture: str = "bitnet-b1.58", seed: int = 0, blocks: int = 2
) -> tuple[GGUF, Truth]:
    """A BitNet whose matrices are of `kind`, one of `gguf_blocks.TYPES`, or "F32" or "F16"."""
    random = np.random.default_rng(seed)
    file = begin(architecture, BITNET_HEADS | {"layer_norm_rms_epsilon": 1e-5}, 5e5, blocks)
    truth: Truth = {}
    table = random.standard_normal((ROWS, 256)).astype(np.float16)
    file.tensors["token_embd.weight"] = Tensor(table.shape, 1, table.tobytes())
    truth["embed"] = table.astype(np.float32)
    for i in range(blocks):
        for name, (ours, n, k) in MATRICES.items():
            scale = np.float32((40 + len(truth)) / 1024)
            codes = random.integers(0, 3, (n, k)).astype(np.uint8)
            codes[0, :256] = 1  # a block of zeros, whose scale a converter leaves at 0
            weights = (codes.astype(np.float32) - 1) * scale
            file.tensors[f"blk.{i}.{name}.weight"] = stored(kind, codes, scale)
            truth[f"layers.{i}.{ours}"] = weights
        add_norms(file, truth, BITNET_NORMS, i, random)
    add_final_norm(file, truth, random)
    return file, truth


def stored(kind: str, codes: np.ndarray, scale: np.float32) -> Tensor:
    """A ternary matrix of one scale."""
    if kind in ("F32", "F16"):
        weights = (codes.astype(np.float32) - 1) * scale
        data = weights.astype("<f4" if kind == "F32" else "<f2").tobytes()
        return Tensor(codes.shape, int(kind == "F16"), data)
    number, group, _ = TYPES[kind]
    if kind == "I2_S":
        return Tensor(codes.shape, number, encode(kind, codes, scale))
    parts = codes.reshape(len(codes), -1, group)
    scales = np.where(np.any(parts != 1, axis=-1), scale, 0)
    return Tensor(codes.shape, number, encode(kind, codes, scales))


def qwen3(
    kind: str = "Q2_0", seed: int = 0, blocks: int = 2, tied: bool = True
) -> tuple[GGUF, Truth]:
    """A Qwen3 whose matrices, embedding and head are of `kind`, one of `gguf_blocks.TYPES`."""
    random = np.random.default_rng(seed)
    file = begin("qwen3", QWEN3_HEADS | {"layer_norm_rms_epsilon": 1e-6}, 1e6, blocks)
    truth: Truth = {}
    add_groups(file, truth, "token_embd", "embed", (ROWS, 256), kind, random)
    for i in range(blocks):
        for name, (ours, n, k) in MATRICES.items():
            add_groups(file, truth, f"blk.{i}.{name}", f"layers.{i}.{ours}", (n, k), kind, random)
        add_norms(file, truth, QWEN3_NORMS, i, random)
    add_final_norm(file, truth, random)
    if not tied:
        add_groups(file, truth, "output", "head", (ROWS, 256), kind, random)
    return file, truth


def add_groups(
    file: GGUF,
    truth: Truth,
    name: str,
    ours: str,
    shape: tuple[int, int],
    kind: str,
    random: np.random.Generator,
) -> None:
    """A matrix with another scale for every 128 weights of a row (256 for TQ types)."""
    number, group, _ = TYPES[kind]
    codes = random.integers(0, 2 if kind == "Q1_0" else 3, shape).astype(np.uint8)
    span = max(group, 128)
    count = shape[0] * shape[1] // span
    scales = (random.permutation(count) + 512).astype(np.float16) / np.float16(16384)
    scales = scales.reshape(shape[0], -1)
    own = np.repeat(scales, span // group, axis=1)
    file.tensors[f"{name}.weight"] = Tensor(shape, number, encode(kind, codes, own))
    signs = codes.astype(np.float32) * (2 if kind == "Q1_0" else 1) - 1
    truth[ours] = signs * np.repeat(scales.astype(np.float32), span, axis=1)


def begin(architecture: str, attention: dict[str, float], theta: float, blocks: int) -> GGUF:
    """A file with the keys of a model and a byte-level vocabulary."""
    file = GGUF()
    file.set("general.architecture", "str", architecture)
    for name, value in (SIZES | {"block_count": blocks}).items():
        file.set(f"{architecture}.{name}", "u32", value)
    for name, value in attention.items():
        kind = "f32" if isinstance(value, float) else "u32"
        file.set(f"{architecture}.attention.{name}", kind, value)
    file.set(f"{architecture}.rope.freq_base", "f32", theta)
    add_vocabulary(file)
    return file


def add_norms(
    file: GGUF, truth: Truth, norms: dict[str, tuple[str, int]], i: int, random: np.random.Generator
) -> None:
    for name, (ours, size) in norms.items():
        weights = random.uniform(0.5, 1.5, size).astype(np.float32)
        file.tensors[f"blk.{i}.{name}.weight"] = Tensor((size,), 0, weights.tobytes())
        truth[f"layers.{i}.{ours}"] = weights


def add_final_norm(file: GGUF, truth: Truth, random: np.random.Generator) -> None:
    truth["norm"] = random.uniform(0.5, 1.5, 256).astype(np.float32)
    file.tensors["output_norm.weight"] = Tensor((256,), 0, truth["norm"].tobytes())


@cache
def trained() -> Tokenizer:
    """A small byte-level tokenizer with the rules and special tokens of Qwen's."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(regex(SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=350, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([TEXT] * 4, trainer)
    tokenizer.add_special_tokens([AddedToken(word, normalized=False) for word in SPECIALS])
    tokenizer.add_tokens([AddedToken("<think>", normalized=False)])
    return tokenizer


def regex(pattern: str):  # type: ignore[no-untyped-def]
    from tokenizers import Regex

    return Regex(pattern)


def vocabulary(tokenizer: Tokenizer) -> tuple[list[str], list[int], list[str]]:
    """Tokens, token types and merges, as a GGUF file has them."""
    import json

    model = json.loads(tokenizer.to_str())["model"]
    added = tokenizer.get_added_tokens_decoder()
    words = tokenizer.get_vocab(with_added_tokens=True)
    tokens = sorted(words, key=words.__getitem__)
    types = [
        (3 if added[place].special else 4) if place in added else 1 for place in range(len(tokens))
    ]
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    return tokens, types, merges


def add_vocabulary(file: GGUF) -> None:
    """The trained tokenizer, padded to more tokens than it has, and a chat template."""
    tokens, types, merges = vocabulary(trained())
    ends = {word: tokens.index(word) for word in SPECIALS}
    while len(tokens) < ROWS - 8:
        tokens.append(f"[PAD{len(tokens)}]")
        types.append(5)
    file.set("tokenizer.ggml.model", "str", "gpt2")
    file.set("tokenizer.ggml.pre", "str", "qwen2")
    file.set("tokenizer.ggml.tokens", ("array", "str"), tokens)
    file.set("tokenizer.ggml.token_type", ("array", "i32"), types)
    file.set("tokenizer.ggml.merges", ("array", "str"), merges)
    file.set("tokenizer.ggml.eos_token_id", "u32", ends["<|im_end|>"])
    file.set("tokenizer.ggml.padding_token_id", "u32", ends["<|endoftext|>"])
    file.set("tokenizer.ggml.add_bos_token", "bool", False)
    file.set("tokenizer.chat_template", "str", TEMPLATE)
