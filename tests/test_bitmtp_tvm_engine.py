import math
import subprocess
import sys
import threading
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import pytest
from fake_model import FakeModel, hashed
from twin_session import CHEAP_ROWS, TwinSession, mtp_of

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


def session_of(depth=2, **model):
    return TwinSession(FakeModel(vocab_size=8192, **model), depth=depth)


def continuation(prompt, count):
    return session_of().model.continuation(prompt, count)


@pytest.fixture
def open_engine(monkeypatch):
    def open_with(session=None, codec=CODEC, eos=(1,), chat=None, mtp=False):
        session = session or session_of()
        predicts = mtp_of(session.model) if mtp else None
        parts = Parts(session, codec, frozenset(eos), CHEAP_ROWS, predicts, chat)
        monkeypatch.setattr(engine_module, "open_parts", lambda directory, progress, graph: parts)
        return Engine("somewhere")

    return open_with


def scripted(text, prompt_tokens, end=None, depth=2, **model):
    """A session that says `text`, then `end` (or an ordinary token) for ever."""
    ids = CODEC.encode(text)[1:]
    script = dict.fromkeys(range(64), 40 if end is None else end)
    script.update(enumerate(ids, start=prompt_tokens))
    return session_of(depth, script=script, **model)


def test_pieces_join_to_the_text_of_all_ids(open_engine):
    generation = open_engine().generate("hello", max_new_tokens=30)
    pieces = list(generation)
    ids = continuation(CODEC.encode("hello"), 30)
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
    assert list(generation.tokens()) == continuation([7, 8], 5)
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
    assert list(result.token_ids) == continuation(ids, 7)
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
    session = session_of()
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
    session = session_of()
    with pytest.raises(UsageError, match=message):
        open_engine(session).generate(prompt, max_new_tokens=wanted)
    assert session.calls == []


def test_a_full_context_gives_no_token(open_engine):
    result = open_engine(session_of(context=3)).generate([1, 2, 3]).result()
    assert (result.text, result.token_ids, result.finish_reason) == ("", (), "length")
    assert result.stats.tokens_per_second == 0


def test_a_failed_generation_has_no_result(open_engine):
    engine = open_engine(session_of(script={2: 40, 3: 40, 4: 40, 5: -1}))
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
    assert newer.result().token_ids == tuple(continuation(CODEC.encode("two"), 3))


@pytest.mark.parametrize("tokenizer", [DEMO, None])
def test_the_parts_come_from_the_artifact(monkeypatch, tmp_path, tokenizer):
    order, mtp = [], {"block_size": 4}
    template = tmp_path / "chat_template.jinja"
    template.write_text("{{ bos_token }}{{ messages[0].content }}")
    info = TokenizerInfo(
        tokenizer and tokenizer.name, True, 0, (1, 7), 2, special_tokens={"bos_token": "<|bos|>"}
    )
    artifact = SimpleNamespace(
        tokenizer=tokenizer,
        chat_template=template if tokenizer else None,
        manifest=SimpleNamespace(config={"vocab_size": 8192, "mtp": mtp}, tokenizer=info),
    )
    measured = CHEAP_ROWS if tokenizer else None
    monkeypatch.setattr(engine_module, "read_step_times", lambda path, manifest: measured)
    monkeypatch.setattr(engine_module, "predict", lambda manifest: "predicted")

    def session(given, progress, graph):
        order.append("session")
        assert given is artifact and progress is print and graph is False
        return session_of()

    monkeypatch.setattr(artifact_module, "open_artifact", lambda path: artifact)
    monkeypatch.setattr(artifact_module, "check_device", lambda a: order.append("device"))
    monkeypatch.setitem(sys.modules, "bitmtp_tvm.session", SimpleNamespace(Session=session))
    parts = engine_module.open_parts(Path("x"), print, False)
    assert parts.eos_token_ids == {1, 7} and order == ["device", "session"]
    assert (parts.codec.encode("") if parts.codec else None) == ([0] if tokenizer else None)
    assert parts.step_times == (CHEAP_ROWS if tokenizer else "predicted") and parts.mtp is mtp
    message = [{"role": "user", "content": "hi"}]
    assert (parts.chat and parts.chat.render(message)) == (tokenizer and "<|bos|>hi")


WORDS = "one two three four five"


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("mode", ["ar", "speculative"])
@pytest.mark.parametrize("stop", ["three", " thr", "ree four", "e", "o", "five", "six", " fiver"])
def test_a_stop_string_ends_the_text_before_it(open_engine, stop, mode, depth):
    prompt = CODEC.encode("x")
    session = scripted(WORDS, len(prompt), end=1, depth=depth, quality=hashed(1, 0.9))
    engine = open_engine(session, mtp=True)
    generation = engine.generate("x", 40, mode=mode, stop=[stop, "never"])
    text = "".join(generation)
    result = generation.result()
    ids = CODEC.encode(WORDS)[1:]
    assert text == result.text == WORDS.partition(stop)[0] and result.finish_reason == "stop"
    if stop not in WORDS:
        assert result.token_ids == (*ids, 1)
        return
    # The token that completed it is the last one.
    count = next(n for n in range(len(ids)) if stop in CODEC.decode(ids[: n + 1])) + 1
    assert list(result.token_ids) == ids[:count] and result.stats.new_tokens == count
    assert len(result.logprobs) == count and session.under_way == 0
    # What the device had committed behind it does not count: the next turn goes on from there.
    again = engine.generate([*prompt, *result.token_ids], 40, mode=mode).result()
    assert list(again.token_ids) == [*ids[count:], 1]
    assert again.stats.cached_tokens == again.stats.prompt_tokens - 1


@pytest.mark.parametrize("stop", ["zz", "fives", "x", "one two three four five six"])
def test_no_word_is_dropped_when_no_stop_string_comes(open_engine, stop):
    engine = open_engine(scripted(WORDS, len(CODEC.encode("x")), end=1))
    generation = engine.generate("x", 40, stop=stop)
    assert "".join(generation) == WORDS == generation.result().text


def test_a_stop_string_and_the_last_wanted_token_at_once_are_a_stop(open_engine):
    engine = open_engine(scripted(WORDS, len(CODEC.encode("x"))))
    count = next(n for n in range(9) if "two" in CODEC.decode(CODEC.encode(WORDS)[1 : n + 2])) + 1
    result = engine.generate("x", count, stop="two").result()
    assert (result.text, result.finish_reason) == ("one ", "stop")
    result = engine.generate("x", count - 1, stop="two").result()
    assert result.finish_reason == "length"
    assert result.text == CODEC.decode(result.token_ids) and "two" not in result.text


def test_a_stop_string_may_be_completed_by_what_was_held_back(open_engine):
    ids = CODEC.encode("ab漢")[1:]
    engine = open_engine(scripted("ab漢", len(CODEC.encode("x"))))
    # The character is not complete: it is a replacement character now that nothing follows.
    result = engine.generate("x", len(ids) - 1, stop="\ufffd").result()
    assert (result.text, result.finish_reason) == ("ab", "stop")


@pytest.mark.parametrize("depth", [1, 2])
def test_a_generation_may_be_cancelled(open_engine, depth):
    engine = open_engine(session_of(depth))
    prompt = CODEC.encode("hello")
    whole = continuation(prompt, 40)
    for read in range(12):
        generation = engine.generate("hello", 30)
        assert list(islice(generation.tokens(), read)) == whole[:read]
        generation.cancel()
        result = generation.result()
        assert result.finish_reason == generation.finish_reason == "cancelled"
        assert list(result.token_ids) == whole[:read]
        assert result.text == CODEC.decode(result.token_ids)
        assert result.stats.new_tokens == len(result.logprobs) == read
        assert engine.generate("hello", 30).result().token_ids == tuple(whole[:30])
    generation.cancel()
    assert generation.finish_reason == "cancelled"


def test_another_thread_may_cancel(open_engine):
    session = session_of(1, context=4000)
    engine = open_engine(session)
    generation = engine.generate("hello", 3000)
    started = threading.Event()
    forward = session.model.forward

    def watched(rows):
        started.set()
        return forward(rows)

    session.model.forward = watched
    reader = threading.Thread(target=generation.result)
    reader.start()
    assert started.wait(20)
    generation.cancel()
    reader.join(20)
    assert generation.finish_reason == "cancelled"
    assert generation.stats.new_tokens == len(generation.token_ids) < 3000


def test_a_reset_forgets_the_sequence(open_engine):
    engine = open_engine()
    first = engine.generate("hello world", 5).result()
    assert engine.generate("hello world", 5).result().stats.cached_tokens > 0
    engine.reset()
    again = engine.generate("hello world", 5).result()
    assert again.stats.cached_tokens == 0 and again.token_ids == first.token_ids


def test_turns_of_a_chat_reuse_what_they_share(open_engine):
    engine = open_engine(session_of(context=200), chat=CHAT)
    talk = [{"role": "user", "content": "hello"}]
    answer = engine.chat(talk, 5).result()
    talk += [{"role": "assistant", "content": answer.text}, {"role": "user", "content": "go on"}]
    second = engine.chat(talk, 5)
    assert second.stats.cached_tokens >= len(engine.encode_chat("hello")) - 1
    assert list(second.tokens()) == session_of(context=200).model.continuation(
        engine.encode_chat(talk), 5
    )


@pytest.mark.parametrize("start", ["generate", "chat"])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "hybrid", "min_chain": 9}, "min_chain is 9"),
        ({"mode": "ar", "block_size": 2}, "block_size means nothing in mode ar"),
        ({"layout": "tree"}, "layout 'tree' is unknown"),
        ({"temperature": -1}, "temperature"),
        ({"stop": ""}, "no stop string"),
        ({"stop": ["a", ""]}, "no stop string"),
    ],
)
def test_options_that_cannot_be_served_are_refused_before_any_work(
    open_engine, start, options, message
):
    session = session_of()
    engine = open_engine(session, chat=CHAT, mtp=True)
    with pytest.raises(UsageError, match=message):
        getattr(engine, start)("hello", 5, **options)
    assert session.calls == []


@pytest.mark.parametrize("start", ["generate", "chat"])
def test_an_unknown_option_is_not_dropped(open_engine, start):
    engine = open_engine(chat=CHAT)
    with pytest.raises(TypeError, match="temprature"):
        getattr(engine, start)("hello", 5, temprature=0.5)


def test_without_mtp_or_tokenizer_some_options_are_refused(open_engine):
    with pytest.raises(UsageError, match="needs a model with multi-token prediction"):
        open_engine().generate("x", mode="speculative")
    with pytest.raises(UsageError, match="no tokenizer: stop strings need text"):
        open_engine(codec=None).generate([1, 2], stop="x")
    assert open_engine(codec=None).generate([1, 2], 3).result().finish_reason == "length"


def test_a_seed_and_logprobs_come_through(open_engine):
    engine = open_engine(session_of(sharpness=0.5), mtp=True)
    sampled = {"temperature": 1.0, "top_k": 40, "seed": 3}
    first, second = (engine.generate("hello", 12, **sampled).result() for _ in range(2))
    plain = engine.generate("hello", 12, mode="ar", **sampled).result()
    assert first.token_ids == second.token_ids == plain.token_ids
    assert list(first.token_ids) != continuation(CODEC.encode("hello"), 12)
    greedy = engine.generate("hello", 4).result()
    assert greedy.logprobs == pytest.approx([math.log(0.5)] * 4, rel=1e-4)
    answer = greedy.to_dict(logprobs=True)
    assert list(answer) == ["text", "token_ids", "logprobs", "finish_reason", "stats"]
    assert answer["logprobs"] == pytest.approx([math.log(0.5)] * 4, rel=1e-4)
    assert "logprobs" not in greedy.to_dict()


def test_the_package_and_its_engine_class_import_no_tvm():
    code = "import sys, bitmtp_tvm; assert 'bitmtp_tvm.engine' not in sys.modules; "
    code += "bitmtp_tvm.Engine; from bitmtp_tvm import generate; assert 'tvm' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=DEMO.parents[3])
    with pytest.raises(AttributeError, match="nothing"):
        _ = bitmtp_tvm.nothing
