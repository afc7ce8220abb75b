"""GGUF vocabularies: the tokenizer that comes out, its special ids, its chat template."""

import copy
import random
from itertools import pairwise

import gguf_models
import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from bitmtp_tvm.checkpoint import open_checkpoint
from bitmtp_tvm.errors import BitMTPError

TEXTS = [
    gguf_models.TEXT,
    "",
    "I'LL don'T  1234567 x=12 +3;\r\n\n\n\tend   ",
    "<|im_start|>user\nhi<|im_end|>\n<think>no</think> <|endoftext|>",
    "e\u0301 caf\u00e9 漢字仮名 🙂 \u200b\x00\x7f",
    "[PAD330] a[PAD331]",
]


def random_texts(count=200):
    chance = random.Random(4)
    alphabet = "abthe quickI'lmsdt  \n\r\t019!?,.é漢字🙂<|_▁"
    for _ in range(count):
        yield "".join(chance.choice(alphabet) for _ in range(chance.randrange(40)))


@pytest.fixture
def file():
    return gguf_models.qwen3("Q1_0", blocks=1)[0]


def opened(tmp_path, file):
    return open_checkpoint(file.write(tmp_path / "model.gguf"))


def tokenizer_of(tmp_path, file):
    return Tokenizer.from_str(opened(tmp_path, file).tokenizer_json().decode())


def refused(tmp_path, file, *parts):
    with pytest.raises(BitMTPError) as caught:
        opened(tmp_path, file)
    sentence = str(caught.value)
    assert "\n" not in sentence
    for part in ("model.gguf", *parts):
        assert part in sentence


def assert_alike(got, wanted, texts):
    for text in texts:
        ids = wanted.encode(text, add_special_tokens=False).ids
        assert got.encode(text, add_special_tokens=False).ids == ids, text
        for skip in (True, False):
            assert got.decode(ids, skip_special_tokens=skip) == wanted.decode(
                ids, skip_special_tokens=skip
            )


def test_the_tokenizer_that_the_vocabulary_was_made_of(file, tmp_path):
    got = tokenizer_of(tmp_path, file)
    assert_alike(got, gguf_models.trained(), [*TEXTS, *random_texts()])
    assert got.token_to_id("<|im_end|>") == gguf_models.trained().token_to_id("<|im_end|>")


def test_what_the_file_says_about_text(file, tmp_path):
    checkpoint = opened(tmp_path, file)
    ends = [gguf_models.trained().token_to_id(word) for word in gguf_models.SPECIALS]
    assert checkpoint.eos_token_ids == (ends[2],)
    assert checkpoint.bos_token_id is None and not checkpoint.add_bos
    assert checkpoint.chat_template == gguf_models.TEMPLATE
    assert checkpoint.special_tokens == {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    assert checkpoint.tokenizer is None


def llama(ignore_merges=True):
    """A small tokenizer with Llama 3's rules."""
    pattern = gguf_models.SPLIT.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
    tokenizer = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(gguf_models.regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=340, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(["there 123 456 1234 12 other 123"] * 4, trainer)
    words = ["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"]
    tokenizer.add_special_tokens([AddedToken(word, normalized=False) for word in words])
    return tokenizer


def with_llama(file, pre):
    tokens, types, merges = gguf_models.vocabulary(llama())
    # A word that no merges lead to: only a tokenizer that looks words up whole finds it.
    tokens.append("zebra")
    types.append(1)
    file.set("tokenizer.ggml.tokens", ("array", "str"), tokens)
    file.set("tokenizer.ggml.token_type", ("array", "i32"), types)
    file.set("tokenizer.ggml.merges", ("array", "str"), merges)
    file.set("tokenizer.ggml.bos_token_id", "u32", tokens.index("<|begin_of_text|>"))
    file.set("tokenizer.ggml.eos_token_id", "u32", tokens.index("<|end_of_text|>"))
    for name in ("tokenizer.ggml.add_bos_token", "tokenizer.ggml.pre"):
        del file.keys[name]
    if pre is not None:
        file.set("tokenizer.ggml.pre", "str", pre)
    return tokens


@pytest.mark.parametrize("pre", ["llama-bpe", "default", None])
def test_llama_3(file, tmp_path, pre):
    """`pre` is missing from the published BitNet files: their special tokens tell."""
    tokens = with_llama(file, pre)
    got = tokenizer_of(tmp_path, file)
    assert_alike(got, llama(), [*TEXTS, *random_texts()])
    assert got.encode("1234567").tokens[0] == "123"
    assert got.encode("zebra").tokens == ["zebra"]
    checkpoint = opened(tmp_path, file)
    assert checkpoint.add_bos and checkpoint.bos_token_id == tokens.index("<|begin_of_text|>")


def test_the_end_of_a_turn_is_an_end_if_the_template_writes_it(file, tmp_path):
    tokens = with_llama(file, "llama-bpe")
    end, turn = tokens.index("<|end_of_text|>"), tokens.index("<|eot_id|>")
    assert opened(tmp_path, file).eos_token_ids == (end,)
    file.set("tokenizer.chat_template", "str", "{{ messages[0].content }}<|eot_id|>")
    assert opened(tmp_path, file).eos_token_ids == (end, turn)
    del file.keys["tokenizer.chat_template"]
    file.set("tokenizer.ggml.eot_token_id", "u32", turn)
    checkpoint = opened(tmp_path, file)
    assert checkpoint.eos_token_ids == (end, turn) and checkpoint.chat_template is None


@pytest.mark.parametrize(
    ("flag", "bos", "adds"), [(True, 5, True), (False, 5, False), (None, None, False)]
)
def test_the_start_token(file, tmp_path, flag, bos, adds):
    with_llama(file, "llama-bpe")
    del file.keys["tokenizer.ggml.bos_token_id"]
    if flag is not None:
        file.set("tokenizer.ggml.add_bos_token", "bool", flag)
    if bos is not None:
        file.set("tokenizer.ggml.bos_token_id", "u32", bos)
    checkpoint = opened(tmp_path, file)
    assert (checkpoint.add_bos, checkpoint.bos_token_id) == (adds, bos)


def test_plain_byte_pairs(file, tmp_path):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([gguf_models.TEXT] * 3, trainer)
    tokens, types, merges = gguf_models.vocabulary(tokenizer)
    file.set("tokenizer.ggml.pre", "str", "gpt-2")
    file.set("tokenizer.ggml.tokens", ("array", "str"), tokens)
    file.set("tokenizer.ggml.token_type", ("array", "i32"), types)
    file.set("tokenizer.ggml.merges", ("array", "str"), merges)
    assert_alike(tokenizer_of(tmp_path, file), tokenizer, [*TEXTS, *random_texts()])


# ---- SentencePiece


def pieces():
    """A vocabulary of Llama 2's kind: unknown, start, end, bytes, then pieces by falling score."""
    words = ["▁the", "▁th", "he", "▁t", "th", "▁▁", "qu", "ick", "ic", "ck", "▁qu", "▁quick"]
    words += ["aaa", "aa", "a▁", "01", "9!", "!!", "ll", "I'", "é漢"]
    letters = sorted(set("abthequickI'lmsdt\n01!?,.é漢<|_▁9"))
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    types = [2, 3, 3, *[6] * 256]
    scores = [0.0] * len(tokens)
    for place, word in enumerate([*words, *letters]):
        tokens.append(word)
        types.append(1)
        scores.append(-float(place))
    return tokens, types, scores


def merge_best(text, tokens, scores):
    """SentencePiece's own way: again and again the neighbours that make the best piece."""
    score = dict(zip(tokens, scores, strict=True))
    parts = list("▁" + text.replace(" ", "▁"))
    while True:
        pairs = [
            (-score[a + b], place) for place, (a, b) in enumerate(pairwise(parts)) if a + b in score
        ]
        if not pairs:
            break
        place = min(pairs)[1]
        parts[place : place + 2] = [parts[place] + parts[place + 1]]
    ids = []
    for part in parts:
        spelled = [f"<0x{byte:02X}>" for byte in part.encode()]
        ids += [tokens.index(word) for word in ([part] if part in score else spelled)]
    return ids


def with_pieces(file):
    tokens, types, scores = pieces()
    file.set("tokenizer.ggml.model", "str", "llama")
    file.set("tokenizer.ggml.tokens", ("array", "str"), tokens)
    file.set("tokenizer.ggml.token_type", ("array", "i32"), types)
    file.set("tokenizer.ggml.scores", ("array", "f32"), scores)
    file.set("tokenizer.ggml.bos_token_id", "u32", 1)
    file.set("tokenizer.ggml.eos_token_id", "u32", 2)
    file.set("tokenizer.ggml.unknown_token_id", "u32", 0)
    for name in ("merges", "pre", "padding_token_id", "add_bos_token"):
        del file.keys[f"tokenizer.ggml.{name}"]
    return tokens, scores


def test_sentence_piece(file, tmp_path):
    tokens, scores = with_pieces(file)
    got = tokenizer_of(tmp_path, file)
    for text in ["the quick the  quick", "aaaaa aaaa", "é漢🙂\x00", *random_texts()]:
        if text:
            ids = merge_best(text, tokens, scores)
            assert got.encode(text, add_special_tokens=False).ids == ids, text
            assert got.decode(ids) == text.replace("▁", " ")
    assert got.encode("a</s>").ids[-1] == 2
    checkpoint = opened(tmp_path, file)
    assert (checkpoint.add_bos, checkpoint.bos_token_id, checkpoint.eos_token_ids) == (
        True,
        1,
        (2,),
    )
    assert checkpoint.special_tokens["unk_token"] == "<unk>"


def test_sentence_piece_without_the_space_in_front(file, tmp_path):
    with_pieces(file)
    file.set("tokenizer.ggml.add_space_prefix", "bool", False)
    got = tokenizer_of(tmp_path, file)
    assert got.encode("the").tokens == ["t", "he"]
    assert got.decode(got.encode(" the").ids) == " the"


# ---- what is refused


def test_a_vocabulary_smaller_than_the_tokenizer(file, tmp_path):
    kind, tokens = file.keys["tokenizer.ggml.tokens"]
    file.set("tokenizer.ggml.tokens", kind, tokens + [f"x{i}" for i in range(9)])
    refused(tmp_path, file, "401 tokens", "400 rows")


@pytest.mark.parametrize(
    "key", ["bos_token_id", "eos_token_id", "eot_token_id", "padding_token_id"]
)
@pytest.mark.parametrize(("kind", "value"), [("u32", 400), ("i32", -1), ("str", "x"), ("f32", 1.0)])
def test_ids_outside_the_vocabulary(file, tmp_path, key, kind, value):
    file.set(f"tokenizer.ggml.{key}", kind, value)
    refused(tmp_path, file, key, "400 rows")


@pytest.mark.parametrize(
    ("key", "kind", "value", "part"),
    [
        ("model", "str", "bert", "tokenizer.ggml.model is 'bert'"),
        ("model", "u32", 3, "tokenizer.ggml.model is no text"),
        ("pre", "str", "gpt-4o", "tokenizer.ggml.pre is 'gpt-4o'"),
        ("tokens", "str", "a", "no texts in tokenizer.ggml.tokens"),
        ("tokens", ("array", "u8"), [1], "no texts in tokenizer.ggml.tokens"),
        ("tokens", ("array", "str"), ["a", "b", "a"], "the token 'a' stands twice"),
        ("token_type", ("array", "i32"), [1, 1], "token_type must hold 392 numbers"),
        ("merges", ("array", "str"), ["a b"], "merges has 'a b'"),
        ("merges", ("array", "str"), ["ab"], "merges has 'ab'"),
        ("merges", ("array", "i32"), [1], "no texts in tokenizer.ggml.merges"),
        ("add_bos_token", "str", "yes", "add_bos_token is 'yes'"),
        ("add_bos_token", "bool", True, "lacks tokenizer.ggml.bos_token_id"),
        ("add_eos_token", "bool", True, "add_eos_token is set"),
    ],
)
def test_vocabularies_that_cannot_be_read(file, tmp_path, key, kind, value, part):
    file.set(f"tokenizer.ggml.{key}", kind, value)
    refused(tmp_path, file, part)


def test_a_template_that_is_no_text(file, tmp_path):
    file.set("tokenizer.chat_template", "u32", 1)
    refused(tmp_path, file, "tokenizer.chat_template is no text")


def test_an_unnamed_kind_that_nothing_tells(file, tmp_path):
    tokens = [token for token in file.keys["tokenizer.ggml.tokens"][1] if "im_" not in token]
    file.set("tokenizer.ggml.tokens", ("array", "str"), tokens)
    for name in ("pre", "token_type"):
        del file.keys[f"tokenizer.ggml.{name}"]
    refused(tmp_path, file, "tokenizer.ggml.pre is None", "Hugging Face directory")


def test_scores_that_are_missing_or_too_few(file, tmp_path):
    with_pieces(file)
    broken = copy.deepcopy(file)
    del broken.keys["tokenizer.ggml.scores"]
    refused(tmp_path, broken, "lacks the key tokenizer.ggml.scores")
    file.set("tokenizer.ggml.scores", ("array", "f32"), [0.0])
    refused(tmp_path, file, "scores must hold")


def test_an_endless_token(file, tmp_path):
    tokens, scores = with_pieces(file)
    file.set("tokenizer.ggml.tokens", ("array", "str"), [*tokens[:-1], "a" * 100_000])
    refused(tmp_path, file, "100000 characters long")
    assert np.isfinite(scores).all()


def test_a_file_without_a_vocabulary(file, tmp_path):
    for name in [name for name in file.keys if name.startswith("tokenizer.ggml")]:
        del file.keys[name]
    file.set("tokenizer.ggml.eos_token_id", "u32", 7)
    checkpoint = opened(tmp_path, file)
    assert checkpoint.tokenizer_json() is None and checkpoint.eos_token_ids == (7,)
