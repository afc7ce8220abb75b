import json
import random
from functools import cache
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models

import bitmtp_tvm
from bitmtp_tvm.errors import BitMTPError, UsageError
from bitmtp_tvm.text import TextCodec, TextStream

DEMO = Path(bitmtp_tvm.__file__).parent / "assets" / "demo" / "tokenizer.json"
BOS, EOS = 0, 1
TEXTS = [
    "def fibonacci(n):\n    return n",
    "naïve café — “quotes” … 漢字かな交じり文 한국어 שלום",
    "👩‍👩‍👧‍👦 🏳️‍🌈 🇫🇷 e\u0301 \ufffd \ufffd\ufffd end",
    "  two spaces  \n\n\ttabs\r\n trailing ",
    "\x00\x7f\u2028\U0010ffff",
]


@pytest.fixture(scope="module")
def codec():
    return TextCodec(DEMO, add_bos=True, bos_token_id=BOS, vocab_size=8192)


@pytest.fixture(scope="module")
def byte_token_codec(tmp_path_factory):
    """A vocabulary with byte tokens (id = byte) and a decoder that strips the first space."""
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)}
    for word in ("▁a", "b", "▁", "▁cd", "é"):
        vocabulary[word] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    path = tmp_path_factory.mktemp("bytes") / "tokenizer.json"
    tokenizer.save(str(path))
    return TextCodec(path, add_bos=False, bos_token_id=None, vocab_size=261)


@cache
def byte_table():
    """The demo's token of each byte; byte-level vocabularies write unprintable ones as U+0100…"""
    words = json.loads(DEMO.read_text("utf-8"))["model"]["vocab"]
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    spare = iter(range(256, 512))
    return [words[chr(byte if byte in printable else next(spare))] for byte in range(256)]


def byte_ids(data):
    """Single-byte tokens for `data`, complete characters or not."""
    return [byte_table()[byte] for byte in data]


def streamed(codec, ids):
    stream = TextStream(codec)
    return [*(stream.push(token) for token in ids), stream.flush()]


@pytest.mark.parametrize("text", TEXTS)
def test_text_comes_back_whole_and_in_pieces(codec, text):
    ids = codec.encode(text)
    assert ids[0] == BOS
    assert codec.decode(ids) == text
    assert "".join(streamed(codec, ids)) == text


@pytest.mark.parametrize("text", TEXTS)
def test_a_character_comes_with_its_last_byte(codec, text):
    stream = TextStream(codec)
    shown = ""
    for place, token in enumerate(byte_ids(text.encode()), start=1):
        shown += stream.push(token)
        complete = text.encode()[:place].decode(errors="ignore")
        # A literal U+FFFD looks like an unfinished character until the next one comes.
        assert shown == complete.rstrip("\ufffd") or shown == complete
    assert shown + stream.flush() == text


@pytest.mark.parametrize(
    "data",
    [b"\xff", b"ok\xe4\xbd", b"\xe4\xbdA\x80B", b"\xf0\x9f\x98", b"\xc3\xc3\xa9", b"\xed\xa0\x80x"],
)
def test_bytes_that_are_no_character_become_replacements(codec, data):
    pieces = streamed(codec, byte_ids(data))
    assert "".join(pieces) == data.decode(errors="replace")


@pytest.mark.parametrize("seed", range(8))
def test_random_tokens_stream_to_their_text(codec, seed):
    chance = random.Random(seed)
    for _ in range(50):
        ids = [chance.randrange(8192) for _ in range(chance.randrange(30))]
        ids += byte_ids(chance.randbytes(chance.randrange(6)))
        assert "".join(streamed(codec, ids)) == codec.decode(ids)


@pytest.mark.parametrize("seed", range(8))
def test_random_byte_tokens_stream_to_their_text(byte_token_codec, seed):
    chance = random.Random(seed)
    for _ in range(50):
        ids: list[int] = []
        while len(ids) < chance.randrange(20):
            letter = chance.choice("éλ€😀A").encode()
            ids += (
                letter[: chance.randrange(1, 6)] if chance.random() < 0.5 else [256 + len(ids) % 5]
            )
        assert "".join(streamed(byte_token_codec, ids)) == byte_token_codec.decode(ids)


def test_words_are_not_delayed(codec):
    ids = codec.encode("plain words come one by one")
    assert all(streamed(codec, ids)[1:-1])


def test_special_tokens_are_no_text_and_do_not_split_characters(codec):
    first, second, third = byte_ids("漢".encode())
    assert "".join(streamed(codec, [BOS, first, 2, second, third, EOS])) == "漢"
    assert codec.encode("a<|eos|>b")[2] == EOS


def test_the_empty_prompt_is_the_start_token_or_refused(codec):
    assert codec.encode("") == [BOS]
    with pytest.raises(UsageError, match="empty"):
        TextCodec(DEMO, False, None, 8192).encode("")


def test_ids_beyond_the_models_vocabulary_are_refused_by_name():
    small = TextCodec(DEMO, False, None, 300)
    with pytest.raises(UsageError, match=r"'Ġfunction' has id \d+, outside .* of 300"):
        small.encode(" function")


def test_text_that_is_no_unicode_is_refused(codec):
    with pytest.raises(UsageError, match="character 2"):
        codec.encode("ab\udcff")


def test_a_tokenizer_that_truncates_or_pads_does_neither(tmp_path):
    tokenizer = Tokenizer.from_file(str(DEMO))
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=64)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    text = "one two three four five six seven"
    plain = TextCodec(DEMO, False, None, 8192)
    assert TextCodec(tmp_path / "tokenizer.json", False, None, 8192).encode(text) == plain.encode(
        text
    )


@pytest.mark.parametrize("content", [None, "", "{}", '{"model": 3}'])
def test_a_file_that_is_no_tokenizer_is_named(tmp_path, content):
    path = tmp_path / "tokenizer.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(BitMTPError, match=r"tokenizer\.json is not a readable"):
        TextCodec(path, True, 0, 8192)


def test_a_start_token_that_is_wanted_must_be_known():
    with pytest.raises(BitMTPError, match="start token"):
        TextCodec(DEMO, True, None, 8192)
