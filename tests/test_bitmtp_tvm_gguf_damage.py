"""Damaged and hostile GGUF files: each is refused in one sentence, or read."""

import copy
import random
import struct

import gguf_models
import numpy as np
import pytest
from gguf_blocks import encode
from gguf_bytes import GGUF, Tensor
from mutations import EXTREMES, damage, survive

from bitmtp_tvm.checkpoint import dense_shapes, matrix_shapes, open_checkpoint
from bitmtp_tvm.errors import BitMTPError

Q0 = "blk.0.attn_q.weight"


@pytest.fixture(scope="module")
def made():
    return {
        "bitnet": gguf_models.bitnet("I2_S", blocks=1)[0],
        "ternary": gguf_models.qwen3("Q2_0", blocks=1)[0],
        "binary": gguf_models.qwen3("Q1_0", blocks=1, tied=False)[0],
    }


@pytest.fixture
def bitnet(made) -> GGUF:
    return copy.deepcopy(made["bitnet"])


@pytest.fixture
def ternary(made) -> GGUF:
    return copy.deepcopy(made["ternary"])


def read_all(path):
    checkpoint = open_checkpoint(path)
    for name in matrix_shapes(checkpoint.config):
        checkpoint.low_bit(name)
    for name in dense_shapes(checkpoint.config):
        checkpoint.dense(name)
    return checkpoint


def refused(tmp_path, file, *parts):
    """Reading is refused in one sentence that names the file and all `parts`."""
    path = tmp_path / "model.gguf"
    path.write_bytes(file if isinstance(file, bytes) else file.to_bytes())
    with pytest.raises(BitMTPError) as caught:
        read_all(path)
    sentence = str(caught.value)
    assert "\n" not in sentence and len(sentence) < 600
    for part in ("model.gguf", *parts):
        assert part in sentence


# ---- the container


@pytest.mark.parametrize("version", [0, 1, 4, 2**31])
def test_other_versions(bitnet, tmp_path, version):
    bitnet.version = version
    refused(tmp_path, bitnet, f"version {version}" if version < 65536 else "big-endian")


def test_big_endian(bitnet, tmp_path):
    bitnet.version = 3 << 24
    refused(tmp_path, bitnet, "big-endian")


def test_another_magic(bitnet, tmp_path):
    bitnet.magic = b"GGML"
    refused(tmp_path, bitnet, "does not begin with GGUF")


@pytest.mark.parametrize("contents", [b"", b"GG", b"GGUF", b"GGUF\x03\x00\x00\x00"])
def test_hardly_a_file(tmp_path, contents):
    refused(tmp_path, contents)


def test_a_git_lfs_pointer(tmp_path):
    refused(tmp_path, b"version https://git-lfs.github.com/spec/v1\noid x\n", "Git LFS pointer")


def test_truncation_anywhere(bitnet, tmp_path):
    whole = bitnet.to_bytes()
    for size in {*range(4, 200, 7), *range(200, len(whole), 7919), len(whole) - 33}:
        refused(tmp_path, whole[:size], "truncated")


def test_bytes_behind_the_last_tensor(bitnet, tmp_path):
    refused(tmp_path, bitnet.to_bytes() + bytes(40), "40 bytes that belong to no tensor")


@pytest.mark.parametrize("what", ["tensors", "keys"])
@pytest.mark.parametrize("count", [2**17, 2**63, 2**64 - 1])
def test_impossible_counts(bitnet, tmp_path, what, count):
    whole = bytearray(bitnet.to_bytes())
    struct.pack_into("<Q", whole, 8 if what == "tensors" else 16, count)
    refused(tmp_path, bytes(whole), f"{count} {what}")


@pytest.mark.parametrize("length", [2**20, 2**40, 2**64 - 1])
def test_lengths_past_the_end(bitnet, tmp_path, length):
    whole = bytearray(bitnet.to_bytes())
    struct.pack_into("<Q", whole, 24, length)  # the first key's name
    refused(tmp_path, bytes(whole), "the name of key 0")
    value = whole.index(b"bitnet-b1.58")
    struct.pack_into("<Q", whole, 24, len("general.architecture"))
    struct.pack_into("<Q", whole, value - 8, length)
    refused(tmp_path, bytes(whole), "'general.architecture'")
    struct.pack_into("<Q", whole, value - 8, len("bitnet-b1.58"))
    struct.pack_into("<Q", whole, whole.index(b"tokenizer.ggml.tokens") + 21 + 8, length)
    refused(tmp_path, bytes(whole), "'tokenizer.ggml.tokens'")


def test_unknown_value_types(bitnet, tmp_path):
    whole = bytearray(bitnet.to_bytes())
    struct.pack_into("<I", whole, 32 + len("general.architecture"), 13)
    refused(tmp_path, bytes(whole), "unknown value type 13")
    nested = whole.index(b"tokenizer.ggml.tokens") + 21
    struct.pack_into("<I", whole, 32 + len("general.architecture"), 8)
    struct.pack_into("<I", whole, nested + 4, 9)
    refused(tmp_path, bytes(whole), "'tokenizer.ggml.tokens'", "unknown value type 9")


def test_text_that_is_no_utf8(bitnet, tmp_path):
    whole = bitnet.to_bytes()
    refused(tmp_path, whole.replace(b"general.arch", b"general.\xff\xfech"), "not valid UTF-8")


def test_names_that_stand_twice(bitnet, tmp_path):
    whole = bitnet.to_bytes()
    refused(tmp_path, whole.replace(b"blk.0.ffn_gate", b"blk.0.attn_out"), "lacks tensor")
    refused(tmp_path, whole.replace(b"blk.0.attn_q.", b"blk.0.attn_k."), "stands twice")
    refused(tmp_path, whole.replace(b".context_length", b".rope.freq_base"), "key", "stands twice")


@pytest.mark.parametrize("alignment", [0, 3, 33, 2**17, -32])
def test_impossible_alignments(bitnet, tmp_path, alignment):
    bitnet.set("general.alignment", "i32", alignment)
    refused(tmp_path, bitnet, f"general.alignment is {alignment}")


@pytest.mark.parametrize("alignment", [1, 8, 64, 4096])
def test_other_alignments_are_read(bitnet, tmp_path, alignment):
    bitnet.set("general.alignment", "u32", alignment)
    read_all(bitnet.write(tmp_path / "model.gguf"))


@pytest.mark.parametrize("version", [2, 3])
def test_both_versions_are_read_whatever_the_name(bitnet, tmp_path, version):
    bitnet.version = version
    assert read_all(bitnet.write(tmp_path / "model.bin")).name == "model"


def test_a_part_of_a_split_model(bitnet, tmp_path):
    bitnet.set("split.count", "u16", 3)
    refused(tmp_path, bitnet, "one of 3 parts", "llama-gguf-split")


def test_a_file_that_shrinks_after_it_was_opened(bitnet, tmp_path):
    path = bitnet.write(tmp_path / "model.gguf")
    checkpoint = open_checkpoint(path)
    path.write_bytes(path.read_bytes()[:100_000])
    with pytest.raises(BitMTPError, match="became shorter"):
        for name in [*matrix_shapes(checkpoint.config)]:
            checkpoint.low_bit(name)


# ---- the tensors


@pytest.mark.parametrize(
    ("number", "title"),
    [
        (143, "type 143 (PTQ1_0)"),
        (38, "type 38 (TL1)"),
        (26, "type 26 (I32)"),
        (99, "the unknown type 99"),
        (2**32 - 1, f"the unknown type {2**32 - 1}"),
    ],
)
def test_types_that_cannot_be_read(ternary, tmp_path, number, title):
    ternary.tensors[Q0].number = number
    refused(tmp_path, ternary, Q0, title)


@pytest.mark.parametrize("dimensions", [(256, -256), (0, 256), (-(2**63), 1), (256, 2**62)])
def test_impossible_dimensions(bitnet, tmp_path, dimensions):
    bitnet.tensors[Q0].dimensions = dimensions
    bad = f"impossible dimension {min(dimensions)}" if min(dimensions) <= 0 else "truncated"
    refused(tmp_path, bitnet, Q0, bad)


@pytest.mark.parametrize("rank", [0, 5, 2**31])
def test_impossible_ranks(bitnet, tmp_path, rank):
    whole = bytearray(bitnet.to_bytes())
    struct.pack_into("<I", whole, whole.index(Q0.encode()) + len(Q0), rank)
    refused(tmp_path, bytes(whole), Q0, f"{rank} dimensions")


@pytest.mark.parametrize("offset", [2**20, 2**62, 2**64 - 32])
def test_offsets_past_the_end(bitnet, tmp_path, offset):
    bitnet.tensors[Q0].offset = offset
    refused(tmp_path, bitnet, "truncated", Q0)


def test_tensors_that_overlap_or_leave_a_hole(bitnet, tmp_path):
    whole = bitnet.to_bytes()
    second = struct.unpack_from("<Q", whole, whole.index(Q0.encode()) + len(Q0) + 24)[0]
    for offset in (second - 32, second + 32, second + 1):
        bitnet.tensors[Q0].offset = offset
        refused(tmp_path, bitnet, "begins at byte")


def test_rows_that_no_block_divides(ternary, tmp_path):
    ternary.tensors[Q0].dimensions = (257, 256)
    refused(tmp_path, ternary, Q0, "rows of 257 weights")


def test_a_size_that_is_neither_of_the_two_of_type_42(tmp_path):
    """Too little data to tell which, whatever the header claims."""
    file = GGUF()
    file.set("general.architecture", "str", "qwen3")
    codes = np.ones((1, 128), np.uint8)
    data = encode("Q2_0", codes, np.ones((1, 2)))
    file.tensors["a"] = Tensor((1, 128), 42, data)
    refused(tmp_path, file, "Q2_0 (42)", "64 or 128")


def test_missing_extra_and_misshapen_tensors(bitnet, tmp_path):
    for name in ("token_embd.weight", Q0, "blk.0.attn_sub_norm.weight", "output_norm.weight"):
        damaged = copy.deepcopy(bitnet)
        kept = damaged.tensors.pop(name)
        refused(tmp_path, damaged, f"lacks tensor {name}")
        damaged.tensors[f"{name}x"] = kept
        refused(tmp_path, damaged, name)
        damaged.tensors[name] = kept
        refused(tmp_path, damaged, f"holds tensor {name}x")
    bitnet.tensors[Q0].dimensions = (512, 128)
    refused(tmp_path, bitnet, Q0, "(128, 512)", "(256, 256)")
    bitnet.tensors[Q0].dimensions = (256 * 256,)
    refused(tmp_path, bitnet, Q0, "shape (65536,)")


def test_wrong_tying(bitnet, ternary, tmp_path):
    embed = bitnet.tensors["token_embd.weight"]
    bitnet.tensors["output.weight"] = copy.deepcopy(embed)
    assert read_all(bitnet.write(tmp_path / "same.gguf")).config.tie_word_embeddings
    changed = bytearray(embed.data)
    changed[-1] ^= 1
    bitnet.tensors["output.weight"].data = bytes(changed)
    refused(tmp_path, bitnet, "output.weight differs from token_embd.weight", "tied")
    # A Qwen3 may have a head of its own, of the embedding's size.
    head = ternary.tensors[Q0]
    ternary.tensors["output.weight"] = head
    refused(tmp_path, ternary, "output.weight", "(256, 256)", "(400, 256)")


def test_code_three(tmp_path):
    for kind, family in (("TQ2_0", "bitnet"), ("I2_S", "bitnet"), ("Q2_0", "qwen3")):
        file = getattr(gguf_models, family)(kind, blocks=1)[0]
        data = bytearray(file.tensors[Q0].data)
        data[8] |= 0b1100
        file.tensors[Q0].data = bytes(data)
        refused(tmp_path, file, Q0, "code 3")


@pytest.mark.parametrize("bits", [b"\x00\x7c", b"\x00\xfe"])
def test_scales_that_are_not_finite(tmp_path, ternary, bits):
    data = bytearray(ternary.tensors[Q0].data)
    data[:2] = bits
    ternary.tensors[Q0].data = bytes(data)
    refused(tmp_path, ternary, Q0, "scale that is not finite")


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf")])
def test_impossible_scales_of_a_matrix(bitnet, tmp_path, scale):
    data = bytearray(bitnet.tensors[Q0].data)
    struct.pack_into("<f", data, len(data) - 32, scale)
    bitnet.tensors[Q0].data = bytes(data)
    refused(tmp_path, bitnet, Q0, "must be positive")


def test_numbers_that_are_not_finite(bitnet, tmp_path):
    norm = bitnet.tensors["blk.0.attn_norm.weight"]
    norm.data = b"\x00\x00\x80\x7f" + norm.data[4:]
    refused(tmp_path, bitnet, "blk.0.attn_norm.weight", "not finite")


def test_a_bitnet_with_several_scales_a_matrix(tmp_path):
    file = gguf_models.bitnet("TQ1_0", blocks=1)[0]
    codes = np.zeros((256, 256), np.uint8)
    scales = np.full((256, 1), 0.25)
    scales[77] = 0.5
    file.tensors[Q0].data = encode("TQ1_0", codes, scales)
    refused(tmp_path, file, Q0, "sizes 0.25 and 0.5")
    weights = np.full((256, 256), 0.25, np.float32)
    weights[3, 4] = -0.75
    file.tensors[Q0] = Tensor((256, 256), 0, weights.tobytes())
    refused(tmp_path, file, Q0, "sizes 0.25 and 0.75")


def test_halves_of_a_group_with_different_scales(ternary, tmp_path):
    codes = np.zeros((256, 256), np.uint8)
    scales = np.full((256, 4), 0.25)
    scales[9, 3] = 0.5
    ternary.tensors[Q0].data = encode("Q2_0", codes, scales)
    refused(tmp_path, ternary, Q0, "different scales in a group of 128")
    codes[9, 192:] = 1
    ternary.tensors[Q0].data = encode("Q2_0", codes, scales)
    got, own = open_checkpoint(ternary.write(tmp_path / "model.gguf")).low_bit("layers.0.q_proj")
    np.testing.assert_array_equal(got, codes)
    assert np.all(own == 0.25)


# ---- the keys


@pytest.mark.parametrize("family", ["bitnet-b1.58", "qwen3"])
def test_missing_and_mistyped_keys(made, tmp_path, family):
    file = made["ternary" if family == "qwen3" else "bitnet"]
    optional = ("vocab_size", "head_count_kv", "key_length", "value_length")
    for name in [name for name in file.keys if name.startswith(f"{family}.")]:
        damaged = copy.deepcopy(file)
        del damaged.keys[name]
        if not name.endswith(optional):
            refused(tmp_path, damaged, f"lacks the key {name}")
        for wrong in (("str", "x"), (("array", "u32"), [1, 2]), ("bool", True), ("i32", -1)):
            damaged.keys[name] = wrong
            refused(tmp_path, damaged)


def test_architectures_that_are_not_supported(bitnet, tmp_path):
    for value in ("llama", "qwen35", "", "BITNET"):
        bitnet.set("general.architecture", "str", value)
        refused(tmp_path, bitnet, repr(value), "bitnet-b1.58, bitnet-25, bitnet, qwen3")
    bitnet.set("general.architecture", ("array", "u8"), [1])
    refused(tmp_path, bitnet, "general.architecture")


@pytest.mark.parametrize(
    ("key", "kind", "value", "part"),
    [
        ("prism.hadamard.block_size", "u32", 128, "Hadamard rotation"),
        ("qwen3.attention.sliding_window", "u32", 4096, "sliding_window is 4096"),
        ("qwen3.attention.causal", "bool", False, "causal is False"),
        ("qwen3.expert_count", "u32", 8, "expert_count is 8"),
        ("qwen3.final_logit_softcapping", "f32", 30.0, "softcapping is 30.0"),
        ("qwen3.hidden_act", "str", "gelu", "hidden_act is 'gelu'"),
        ("qwen3.hidden_act", "str", "relu2", "hidden_act is 'relu2'"),
        ("qwen3.rope.dimension_count", "u32", 64, "the size of a head, 128"),
        ("qwen3.attention.value_length", "u32", 64, "the size of a head, 128"),
        ("qwen3.rope.scaling.type", "str", "longrope", "only yarn"),
        ("qwen3.rope.scaling.factor", "f32", 4.0, "only yarn"),
        ("qwen3.rope.scale_linear", "f32", 4.0, "scale_linear"),
        (
            "qwen3.attention.head_count_kv",
            ("array", "u32"),
            [1, 1],
            "head_count_kv is array([1, 1]",
        ),
        ("qwen3.block_count", "u32", 1000, "lacks tensor blk.1.attn_norm.weight and 10988 more"),
        ("qwen3.block_count", "u64", 2**63, "positive 32-bit number"),
        ("qwen3.embedding_length", "u32", 320, "hidden_size is 320"),
        ("qwen3.rope.freq_base", "f64", 1e300, "rope_theta is inf"),
        ("qwen3.attention.layer_norm_rms_epsilon", "f32", float("nan"), "rms_norm_eps is nan"),
    ],
)
def test_what_the_keys_may_not_ask_for(ternary, tmp_path, key, kind, value, part):
    ternary.set(key, kind, value)
    refused(tmp_path, ternary, part)


# ---- random damage


def structured(file: GGUF, chance: random.Random) -> bytes:
    """The file with one key, or what it says of one tensor, replaced."""
    damaged = GGUF(dict(file.keys), dict(file.tensors))
    if chance.random() < 0.5:
        name = chance.choice(list(damaged.keys))
        kind, value = chance.choice(
            [
                ("u32", chance.choice(EXTREMES) % 2**32),
                ("i64", chance.randrange(-3, 3)),
                ("f32", chance.choice((0.0, -1.0, 1e38, float("nan"), float("inf")))),
                ("bool", chance.random() < 0.5),
                ("str", chance.choice(("", "x", "gpt2", "llama", "yarn", "\n" * 300))),
                (("array", "str"), ["a"] * chance.randrange(500)),
                (("array", "i32"), [chance.randrange(-9, 9) for _ in range(chance.randrange(500))]),
            ]
        )
        damaged.set(name, kind, value)
        return damaged.to_bytes()
    name = chance.choice(list(damaged.tensors))
    tensor = copy.copy(damaged.tensors.pop(name))
    match chance.randrange(4):
        case 0:
            tensor.number = chance.choice((*EXTREMES[:5], *range(45)))
        case 1:
            sizes = [chance.choice((*EXTREMES[:5], 64, 256, 400, 2**40)) for _ in range(3)]
            tensor.dimensions = tuple(sizes[: chance.randrange(1, 4)])
        case 2:
            tensor.offset = chance.choice((*EXTREMES, 32, 4096))
        case _:
            name = chance.choice(("output.weight", "rope_freqs.weight", "blk.0.attn_q.scale"))
    damaged.tensors[name] = tensor
    return damaged.to_bytes()


def test_five_thousand_damaged_files(made, tmp_path):
    chance = random.Random(20)
    files = list(made.values())
    wholes = [file.to_bytes() for file in files]

    def contents():
        for place in range(5000):
            whole = wholes[place % 3]
            if place % 2:
                yield structured(files[place % 3], chance)
                continue
            # The vocabulary is most of a header: without this most faults would be in its words.
            end = whole.index(b"output_norm.weight") + 60
            words = whole.index(b"tokenizer.ggml.tokens") + 100
            yield damage(
                whole, [range(words), range(whole.index(b".eos_token_id"), end), range(end)], chance
            )

    def read(path):
        checkpoint = open_checkpoint(path)
        if chance.random() < 0.05:
            read_all(path)
        return checkpoint

    said = survive(tmp_path / "model.gguf", contents(), read)
    assert len(said) == 5000 and 200 < said.count("") < 2500
