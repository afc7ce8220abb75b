import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from toy_session import ToySession, toy_continuation

import bitmtp_tvm
from bitmtp_tvm import artifact as artifact_module
from bitmtp_tvm import engine as engine_module
from bitmtp_tvm.chat import ChatTemplate
from bitmtp_tvm.engine import Engine, Parts
from bitmtp_tvm.errors import BitMTPError, UsageError
from bitmtp_tvm.manifest import TokenizerInfo
from bitmtp_tvm.text import TextCodec

DEMO = Path(bitmtp_tvm.__file__).parent / "assets" / "demo" / "tokenizer.json"
CODEC = TextCodec(DEMO, add_bos=True, bos_token_id=0, vocab_size=8192)


@pytest.fixture
def open_engine(monkeypatch):
    def open_with(session=None, codec=CODEC, eos=(1,), chat=None):
        parts = Parts(session or ToySession(), codec, frozenset(eos), chat)
        monkeypatch.setattr(engine_module, "open_parts", lambda directory, progress: parts)
        return Engine("somewhere")

    return open_with


def scripted(text, prompt_tokens, end=None):
    """A session that says `text`, then `end` (or an ordinary token) for ever."""
    ids = CODEC.encode(text)[1:]

    def script(seen):
        place = seen - prompt_tokens
        return ids[place] if place < len(ids) else 40 if end is None else end

    return ToySession(script=script)


def test_pieces_join_to_the_text_of_all_ids(open_engine):
    generation = open_engine().generate("hello", max_new_tokens=30)
    pieces = list(generation)
    ids = toy_continuation(CODEC.encode("hello"), 30)
    result = generation.result()
    assert list(result.token_ids) == ids
    assert "".join(pieces) == result.text == CODEC.decode(ids)
    assert result.finish_reason == "length" and result.stats.new_tokens == 30


@pytest.mark.parametrize("end", [1, 4097])  # one that the tokenizer calls special, one it does not
def test_the_end_token_is_counted_and_not_shown(open_engine, end):
    text = "voilà: 漢字 👍🏽"
    prompt = CODEC.encode("x")
    engine = open_engine(scripted(text, len(prompt), end), eos=(1, 4097))
    generation = engine.generate("x", max_new_tokens=60)
    assert "".join(generation) == text
    result = generation.result()
    assert result.finish_reason == "stop" and result.token_ids[-1] == end
    assert result.stats.new_tokens == len(result.token_ids) == len(CODEC.encode(text))


def test_held_back_bytes_come_when_generation_stops(open_engine):
    prompt = CODEC.encode("x")
    wanted = len(CODEC.encode("ab漢")) - 1
    session = scripted("ab漢字", len(prompt))
    for count in range(1, wanted + 1):
        generation = open_engine(session).generate("x", max_new_tokens=count)
        assert "".join(generation) == CODEC.decode(generation.token_ids)
    assert any("\ufffd" in "".join(open_engine(session).generate("x", n)) for n in range(1, 6))


def test_result_alone_and_reading_half_give_the_same(open_engine):
    engine = open_engine()
    whole = engine.generate("hello", max_new_tokens=12).result()
    half = engine.generate("hello", max_new_tokens=12)
    for _ in half:
        break
    assert half.finish_reason is None
    again = half.result()
    assert (again.text, again.token_ids) == (whole.text, whole.token_ids)
    assert half.finish_reason == "length"


def test_ids_are_taken_as_they_are(open_engine):
    engine = open_engine()
    assert engine.encode([7, 8]) == [7, 8]
    assert engine.encode("") == [0]
    generation = engine.generate([7, 8], max_new_tokens=5)
    assert list(generation.tokens()) == toy_continuation([7, 8], 5)
    assert generation.result().text == CODEC.decode(generation.token_ids)


def test_without_a_tokenizer_there_are_ids_only(open_engine):
    engine = open_engine(codec=None)
    with pytest.raises(UsageError, match="no tokenizer: give token ids"):
        engine.generate("text")
    with pytest.raises(UsageError, match="no tokenizer"):
        list(engine.generate([1, 2, 3]))
    result = engine.generate([1, 2, 3], max_new_tokens=4).result()
    assert result.text is None and len(result.token_ids) == 4
    assert result.to_dict()["text"] is None


CHAT = ChatTemplate(
    "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}",
    {"bos_token": "<|bos|>"},
    "chat_template.jinja",
)


def test_messages_go_through_the_chat_template(open_engine):
    engine = open_engine(chat=CHAT)
    # The template writes the start token itself: it stands there once.
    ids = CODEC.encode("user: hello\n")
    assert ids[0] == 0 and engine.encode_chat("hello") == ids
    assert engine.encode_chat([{"role": "user", "content": "hello"}]) == ids
    result = engine.chat("hello", max_new_tokens=7).result()
    assert list(result.token_ids) == toy_continuation(ids, 7)
    talk = [{"role": role, "content": role} for role in ("system", "user", "assistant", "user")]
    text = "".join(f"{message['role']}: {message['role']}\n" for message in talk)
    assert engine.encode_chat(talk) == CODEC.encode(text)
    # Plain text is as it was.
    assert engine.encode("hello") == CODEC.encode("hello")


@pytest.mark.parametrize(
    ("chat", "codec", "messages", "sentence"),
    [
        (None, CODEC, "hello", "has no chat template"),
        (CHAT, None, "hello", "no tokenizer"),
        (CHAT, CODEC, "word " * 80, r"the prompt has \d+ tokens .* holds 64"),
        (CHAT, CODEC, [], "no message"),
        (CHAT, CODEC, [{"role": "user"}], "message 0"),
        (CHAT, CODEC, "a\udcff", "not valid Unicode"),
        (ChatTemplate("", {}, "x"), CODEC, "hello", "empty prompt"),
    ],
)
def test_messages_that_cannot_be_served(open_engine, chat, codec, messages, sentence):
    session = ToySession()
    engine = open_engine(session, codec=codec, chat=chat)
    with pytest.raises(UsageError, match=sentence):
        engine.chat(messages)
    assert session.calls == []


@pytest.mark.parametrize(
    ("prompt", "wanted", "message"),
    [
        ("word " * 80, 8, r"the prompt has \d+ tokens .* holds 64"),
        ([8192], 8, "8192"),
        ([], 8, "no tokens"),
        ("x", 0, "max_new_tokens is 0"),
    ],
)
def test_what_cannot_be_served_is_refused_before_any_work(open_engine, prompt, wanted, message):
    session = ToySession()
    with pytest.raises(UsageError, match=message):
        open_engine(session).generate(prompt, max_new_tokens=wanted)
    assert session.calls == []


def test_a_full_context_gives_no_token(open_engine):
    result = open_engine(ToySession(context=3)).generate([1, 2, 3]).result()
    assert (result.text, result.token_ids, result.finish_reason) == ("", (), "length")
    assert result.stats.tokens_per_second == 0


def test_a_failed_generation_has_no_result(open_engine):
    engine = open_engine(ToySession(script=lambda seen: -1 if seen > 4 else 40))
    generation = engine.generate([1, 2], max_new_tokens=9)
    with pytest.raises(BitMTPError, match="no finite logit"):
        list(generation)
    with pytest.raises(BitMTPError, match="failed before its end"):
        generation.result()
    assert generation.token_ids == [40, 40, 40]


def test_a_newer_generation_cuts_off_the_older(open_engine):
    engine = open_engine()
    older = engine.generate("one")
    next(older)
    newer = engine.generate("two", max_new_tokens=3)
    with pytest.raises(BitMTPError, match="newer"):
        next(older)
    assert newer.result().token_ids == tuple(toy_continuation(CODEC.encode("two"), 3))


@pytest.mark.parametrize("tokenizer", [DEMO, None])
def test_the_parts_come_from_the_artifact(monkeypatch, tmp_path, tokenizer):
    order = []
    template = tmp_path / "chat_template.jinja"
    template.write_text("{{ bos_token }}{{ messages[0].content }}")
    info = TokenizerInfo(
        tokenizer and tokenizer.name, True, 0, (1, 7), 2, special_tokens={"bos_token": "<|bos|>"}
    )
    artifact = SimpleNamespace(
        tokenizer=tokenizer,
        chat_template=template if tokenizer else None,
        manifest=SimpleNamespace(config={"vocab_size": 8192}, tokenizer=info),
    )

    def session(given, progress):
        order.append("session")
        assert given is artifact and progress is print
        return ToySession()

    monkeypatch.setattr(artifact_module, "open_artifact", lambda path: artifact)
    monkeypatch.setattr(artifact_module, "check_device", lambda a: order.append("device"))
    monkeypatch.setitem(sys.modules, "bitmtp_tvm.session", SimpleNamespace(Session=session))
    parts = engine_module.open_parts(Path("x"), print)
    assert parts.eos_token_ids == {1, 7} and order == ["device", "session"]
    assert (parts.codec.encode("") if parts.codec else None) == ([0] if tokenizer else None)
    message = [{"role": "user", "content": "hi"}]
    assert (parts.chat and parts.chat.render(message)) == (tokenizer and "<|bos|>hi")


def test_the_package_and_its_engine_class_import_no_tvm():
    code = "import sys, bitmtp_tvm; assert 'bitmtp_tvm.engine' not in sys.modules; "
    code += "bitmtp_tvm.Engine; from bitmtp_tvm import generate; assert 'tvm' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=DEMO.parents[3])
    with pytest.raises(AttributeError, match="nothing"):
        _ = bitmtp_tvm.nothing
