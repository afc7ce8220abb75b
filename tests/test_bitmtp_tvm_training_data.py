"""Text and shards become windows of tokens, the same ones for the same seed."""

import json
import lzma

import numpy as np
import pytest
from tiny_training import BOS, EOS, write_text, write_tokenizer
from tokenizers import Tokenizer

from bitmtp_tvm.errors import BitMTPError, UsageError
from bitmtp_tvm.training.batches import shares
from bitmtp_tvm.training.data import Header, TokenShards, anchors_of, windows, write_shard
from bitmtp_tvm.training.schedule import Budget, Schedule
from bitmtp_tvm.training.sources import prepare, read_vocabulary


@pytest.fixture
def vocabulary(tmp_path):
    return read_vocabulary(write_tokenizer(tmp_path / "text" / "tokenizer.json"))


def shards_of(folder, *lengths):
    """Shards that count on from one to the next."""
    start = 0
    for i, length in enumerate(lengths):
        tokens = np.arange(start, start + length) % 50000
        write_shard(
            folder / f"{i}.bin", tokens, Header("uint16", length, 50000, "digest", None, None)
        )
        start += length
    return TokenShards([folder / f"{i}.bin" for i in range(len(lengths))])


def test_windows_are_pieces_of_one_shard_in_an_order_of_the_seed(tmp_path):
    shards = shards_of(tmp_path, 1000, 333)
    one, again, other = (windows(shards, 20, seed) for seed in (1, 1, 2))
    assert len(one) == 49 + 15
    seen = [one[i] for i in range(2 * len(one))]
    for i, window in enumerate(seen):
        assert np.array_equal(np.diff(window), np.ones(19))
        assert window[0] // 1000 == window[-1] // 1000, "a window in two shards"
        assert np.array_equal(window, again[i])
    first, second = ({int(w[0]) for w in part} for part in (seen[:64], seen[64:]))
    assert len(first) == len(second) == 64
    assert first != second, "every epoch has other borders"
    assert [int(one[i][0]) for i in range(9)] != [int(other[i][0]) for i in range(9)]


def test_data_that_holds_no_window_is_refused(tmp_path):
    assert len(windows(shards_of(tmp_path, 20), 20, 0)) == 1
    with pytest.raises(BitMTPError, match="hold no window of 21"):
        windows(shards_of(tmp_path, 20), 21, 0)


def test_a_damaged_shard_is_named(tmp_path):
    shards_of(tmp_path, 100)
    (tmp_path / "0.bin").write_bytes(b"short")
    with pytest.raises(BitMTPError, match=r"0\.bin does not hold the 100 tokens"):
        TokenShards([tmp_path / "0.bin"])


def test_anchors_are_ascending_and_leave_room():
    found = np.stack([anchors_of(i, 12, 40, 4, seed=5) for i in range(50)])
    assert (np.diff(found, axis=1) > 0).all()
    # The last mask row's target is token anchor + 5, at most the 41st.
    assert (found.min(), found.max()) == (0, 35)
    assert np.array_equal(anchors_of(7, 12, 40, 4, seed=5), found[7])
    assert len(anchors_of(0, 50, 40, 4, seed=5)) == 50


def test_processes_share_the_windows_of_a_step():
    both = [n for rank in range(2) for part in shares(8, 3, 2, rank, 2) for n in part]
    assert sorted(both) == list(range(8, 20))


def test_text_is_tokenised_once_with_documents_held_out(tmp_path, vocabulary, monkeypatch):
    folder = write_text(tmp_path / "code", 60)
    (folder / "picture.png").write_bytes(bytes(range(256)))
    (folder / "more.jsonl").write_text(json.dumps({"text": "x = 1\n"}) + "\n\n")
    made = prepare([str(folder)], [], vocabulary, tmp_path / "cache")
    train = np.concatenate(made.train.parts)
    assert (train == BOS).sum() == (train == EOS).sum() == 60
    assert (np.concatenate(made.validation.parts) == BOS).sum() == 1
    text = Tokenizer.from_file(str(vocabulary.path)).decode(train[: int(np.argmax(train == EOS))])
    assert text == (folder / "m000.py").read_text()
    monkeypatch.setattr("bitmtp_tvm.training.sources._tokens", None)
    assert prepare([str(folder)], [], vocabulary, tmp_path / "cache").train.tokens == len(train)


def test_other_data_for_validation_leaves_the_training_data_whole(tmp_path, vocabulary):
    train, held = write_text(tmp_path / "a", 3), write_text(tmp_path / "b", 1)
    made = prepare([str(train)], [str(held)], vocabulary, tmp_path / "cache")
    assert [(np.concatenate(s.parts) == BOS).sum() for s in (made.train, made.validation)] == [3, 1]


def write_xz(path, ids):
    path.write_bytes(lzma.compress(np.array(ids, np.uint16).tobytes()))


def test_packed_shards_are_unpacked_by_their_names(tmp_path, vocabulary):
    folder = tmp_path / "corpus"
    folder.mkdir()
    write_xz(folder / "train0.bin.xz", [BOS, 1, 2, EOS])
    write_xz(folder / "train1.bin.xz", [BOS, 3, EOS])
    write_xz(folder / "val.bin.xz", [BOS, 4, EOS])
    (folder / "README.md").write_text("not training data")
    made = prepare([str(folder)], [], vocabulary, tmp_path / "cache")
    assert np.concatenate(made.train.parts).tolist() == [BOS, 1, 2, EOS, BOS, 3, EOS]
    assert np.concatenate(made.validation.parts).tolist() == [BOS, 4, EOS]


def test_shards_of_another_tokenizer_are_refused_and_nothing_remains(tmp_path, vocabulary):
    write_xz(tmp_path / "train0.bin.xz", [1, 4000])
    with pytest.raises(BitMTPError, match="holds the id 4000"):
        prepare([str(tmp_path / "train0.bin.xz")], [], vocabulary, tmp_path / "cache")
    assert not list((tmp_path / "cache").iterdir())


def test_shards_of_one_name_all_count(tmp_path, vocabulary):
    for name, ids in ("a", [BOS, 1, EOS]), ("b", [BOS, 2, 3, EOS]):
        (tmp_path / name).mkdir()
        write_xz(tmp_path / name / "train.bin.xz", ids)
    places = [str(tmp_path / name) for name in "ab"]
    made = prepare(places, [], vocabulary, tmp_path / "cache")
    assert np.concatenate(made.train.parts).tolist() == [BOS, 1, EOS, BOS, 2, 3, EOS]


def test_what_is_hidden_in_a_folder_is_no_data_but_the_folder_may_be(tmp_path, vocabulary):
    folder = write_text(tmp_path / ".hidden" / "code", 3)
    write_text(folder / ".git", 5)
    made = prepare([f"{folder}/../code"], [], vocabulary, tmp_path / "cache")
    assert (np.concatenate(made.train.parts) == BOS).sum() == 3


def test_what_a_run_writes_is_no_data(tmp_path, vocabulary):
    folder = write_text(tmp_path / "code", 3)
    cache, output = folder / "out.tokens", folder / "out"
    first = prepare([str(folder)], [], vocabulary, cache, output)
    write_text(output, 2)
    assert prepare([str(folder)], [], vocabulary, cache, output).train.tokens == first.train.tokens
    assert len(list(cache.iterdir())) == 1


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"{", "is not valid JSON"),
        (b'{"code": "x"}', "has no text"),
        (b'{"text": "\xff"}', "is not valid JSON: 'utf-8' codec"),
        (b"[" * 200000, "is not valid JSON"),
        (b'{"text": "\\ud800"}', "is no text"),
    ],
)
def test_a_bad_line_is_named(tmp_path, vocabulary, line, reason):
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "x"}\n' + line + b"\n")
    with pytest.raises(BitMTPError, match=rf"a\.jsonl:2 {reason}"):
        prepare([str(tmp_path / "a.jsonl")], [], vocabulary, tmp_path / "cache")


def test_missing_data_is_refused(tmp_path, vocabulary):
    with pytest.raises(UsageError, match="nowhere is not there"):
        prepare([str(tmp_path / "nowhere")], [], vocabulary, tmp_path / "cache")
    folder, empty = write_text(tmp_path / "code", 3), tmp_path / "empty.py"
    empty.write_text("")
    with pytest.raises(UsageError, match=r"empty\.py holds nothing to validate on"):
        prepare([str(folder)], [str(empty)], vocabulary, tmp_path / "cache")


@pytest.mark.parametrize("ids", [{"bos": 999999}, {"eos": -5}, {"bos": "x"}])
def test_an_end_that_no_token_is_is_refused(vocabulary, ids):
    with pytest.raises(BitMTPError, match=r"token is .*tokenizer\.json has 259 tokens"):
        read_vocabulary(vocabulary.path, **ids)


def test_the_learning_rate_goes_by_the_budget():
    cosine = Schedule("cosine", 2.0, 0.1, 0.3)
    assert [cosine.at(s) for s in (0, 0.05, 0.1, 1)] == pytest.approx([0, 1, 2, 0])
    assert cosine.at(0.55) == pytest.approx(1)
    level = Schedule("wsd", 2.0, 0.1, 0.4)
    assert [level.at(s) for s in (0.1, 0.5, 0.6, 0.8, 1, 2)] == pytest.approx([2, 2, 2, 1, 0, 0])
    assert Budget(None, 2.0, tokens=5, seconds=30).spent == 0.25
    assert Budget(100, None, tokens=100).over
