import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from toy_session import ToySession, toy_continuation

import bitmtp_tvm
from bitmtp_tvm import engine as engine_module
from bitmtp_tvm import generate as command
from bitmtp_tvm.chat import ChatTemplate
from bitmtp_tvm.engine import Parts
from bitmtp_tvm.errors import BitMTPError
from bitmtp_tvm.text import TextCodec

ROOT = Path(bitmtp_tvm.__file__).parents[1]
DEMO = ROOT / "bitmtp_tvm" / "assets" / "demo" / "tokenizer.json"
CODEC = TextCodec(DEMO, add_bos=True, bos_token_id=0, vocab_size=8192)


@pytest.fixture
def run(monkeypatch, capsys):
    """Run the command over a toy session; gives (exit code, stdout, stderr)."""

    def run(*arguments, session=None, codec=CODEC, eos=(1,), chat=None):
        parts = Parts(session or ToySession(), codec, frozenset(eos), chat)
        monkeypatch.setattr(engine_module, "open_parts", lambda directory, progress: parts)
        code = command.main(["--artifact", "somewhere", *arguments])
        return code, *capsys.readouterr()

    return run


def text_of(prompt, count):
    return CODEC.decode(toy_continuation(CODEC.encode(prompt), count))


def test_text_goes_to_stdout_and_the_summary_to_stderr(run):
    code, out, err = run("--prompt", "hello", "--max-new-tokens", "9")
    assert (code, out) == (0, text_of("hello", 9) + "\n")
    prompt = len(CODEC.encode("hello"))
    assert err.startswith(f"tokens: {prompt} prompt, 9 new; ")
    assert err.endswith(" tokens per second; finish: length\n") and err.count("\n") == 1


def test_the_empty_prompt_is_the_start_token(run):
    assert run("--prompt", "", "--max-new-tokens", "1")[1] == text_of("", 1) + "\n"


def test_ids_give_ids(run):
    code, out, err = run("--prompt-ids", "1, 2,3", "--max-new-tokens", "4", codec=None)
    assert (code, out) == (0, ",".join(map(str, toy_continuation([1, 2, 3], 4))) + "\n")
    assert err.startswith("tokens: 3 prompt, 4 new")


def test_json_is_one_object_a_line_and_nothing_else(run, tmp_path):
    prompts = ["def f(x):", "", "two\nlines \u2028 漢字", "x"]
    file = tmp_path / "prompts"
    file.write_text("\n\n".join(json.dumps(p, ensure_ascii=False) for p in prompts) + "\r\n")
    code, out, err = run("--prompts", str(file), "--json", "--max-new-tokens", "6")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert len(lines) == len(prompts)
    for prompt, line in zip(prompts, lines, strict=True):
        answer = json.loads(line)
        assert list(answer) == ["text", "token_ids", "finish_reason", "stats"]
        assert answer["token_ids"] == toy_continuation(CODEC.encode(prompt), 6)
        assert answer["text"] == text_of(prompt, 6)
        assert answer["finish_reason"] == "length"
        assert answer["stats"]["prompt_tokens"] == len(CODEC.encode(prompt))
        assert answer["stats"]["new_tokens"] == answer["stats"]["forwards"] == 6


def test_several_texts_come_in_order(run, tmp_path):
    file = tmp_path / "prompts"
    file.write_text('"one"\n"two"')
    code, out, err = run("--prompts", str(file), "--max-new-tokens", "3")
    assert (code, out) == (0, f"{text_of('one', 3)}\n{text_of('two', 3)}\n")
    assert err.count("tokens per second") == 2


def test_json_of_ids_has_the_text_if_there_is_a_tokenizer(run):
    arguments = ["--prompt-ids", "5", "--json", "--max-new-tokens", "2"]
    ids = toy_continuation([5], 2)
    assert json.loads(run(*arguments)[1])["text"] == CODEC.decode(ids)
    answer = json.loads(run(*arguments, codec=None)[1])
    assert answer["text"] is None and answer["token_ids"] == ids


def test_a_message_is_answered_in_the_chat_format(run, tmp_path):
    chat = ChatTemplate("<|bos|>Q: {{ messages[0].content }} A:", {}, "x")
    code, out, _ = run("--chat", "--prompt", "hello", "--max-new-tokens", "9", chat=chat)
    assert (code, out) == (0, text_of("Q: hello A:", 9) + "\n")
    file = tmp_path / "prompts"
    file.write_text('"one"\n"two"')
    code, out, _ = run("--chat", "--prompts", str(file), "--max-new-tokens", "3", chat=chat)
    assert out == "".join(text_of(f"Q: {word} A:", 3) + "\n" for word in ("one", "two"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--chat", "--prompt", "x"], "no chat template"),
        (["--chat", "--prompt-ids", "1,2"], "--chat needs text"),
    ],
)
def test_what_cannot_be_a_chat_is_one_sentence(run, arguments, message):
    session = ToySession()
    code, out, err = run(*arguments, session=session)
    assert (code, out) == (2, "") and message in err and err.count("\n") == 1
    assert session.calls == []


def test_an_end_token_stops(run):
    second = toy_continuation(CODEC.encode("hello"), 2)[1]
    code, out, err = run("--prompt", "hello", eos=(second,))
    assert (code, out) == (0, text_of("hello", 1) + "\n")
    assert "2 new" in err and "finish: stop" in err


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--prompt", "word " * 80], 2, r"has 82 tokens and the artifact's context holds 64"),
        (["--prompt-ids", "1,8192"], 2, "token id 8192 at place 1"),
        (["--prompt-ids=-1"], 2, "token id -1 at place 0"),
        (["--prompt", "a\udcff"], 2, "not valid Unicode"),
        (["--prompts", "absent.jsonl"], 1, "absent.jsonl cannot be read"),
        (["--prompts", "."], 1, "cannot be read"),
    ],
)
def test_bad_prompts_are_one_sentence(run, arguments, code, message):
    session = ToySession()
    answer = run(*arguments, session=session)
    assert answer[:2] == (code, "")
    assert answer[2].startswith("error: ") and message in answer[2] and answer[2].count("\n") == 1
    assert session.calls == []


def test_text_for_an_artifact_without_tokenizer_is_one_sentence(run):
    code, out, err = run("--prompt", "text", codec=None)
    assert (code, out) == (2, "") and "--prompt-ids 1,2,3" in err and err.count("\n") == 1


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'"good"\nbad\n', "line 2: not a JSON string"),
        (b'"good"\n\n["a"]', "line 3: not a JSON string"),
        (b'"\xff"\n', "line 1: not a JSON string"),
        (b'"a" "b"\n', "line 1: not a JSON string"),
        (b"[" * 100000, "line 1: not a JSON string"),
        (b'"good"\n"\\ud800"\n', "line 2: the prompt is not valid Unicode"),
        (b'"good"\n"' + b"word " * 80 + b'"\n', "line 2: the prompt has 82 tokens"),
        (b"\n", "no prompts"),
        (b"", "no prompts"),
    ],
)
def test_a_bad_line_names_file_and_line_before_anything_is_generated(
    run, tmp_path, content, message
):
    file = tmp_path / "prompts.jsonl"
    file.write_bytes(content)
    session = ToySession()
    code, out, err = run("--prompts", str(file), "--json", session=session)
    assert code != 0 and out == "" and session.calls == []
    assert str(file) in err and message in err and err.count("\n") == 1


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--prompt", "a", "--prompts", "b"],
        ["--prompt", "a", "--prompt-ids", "1"],
        ["--prompt-ids", ""],
        ["--prompt-ids", "1,,2"],
        ["--prompt-ids", "1_0,2"],
        ["--prompt-ids", "1,x"],
        ["--prompt", "a", "--max-new-tokens", "many"],
        ["--prompt", "a", "--max-new-tokens", "0"],
        ["--prompt", "a", "--max-new-tokens=-3"],
        ["--prompt", "a", "--max-new-tokens", "2.5"],
        ["--prompt", "a", "--max", "3"],
        ["--prompt", "a", "rest"],
    ],
)
def test_usage_errors_end_with_2(run, capsys, arguments):
    with pytest.raises(SystemExit) as end:
        run(*arguments)
    assert end.value.code == 2 and capsys.readouterr().out == ""


def test_a_traceback_needs_verbose(run):
    assert "Traceback" not in run("--prompt-ids", "9999")[2]
    assert "Traceback" in run("--prompt-ids", "9999", "--verbose")[2]


def test_a_failure_on_the_way_ends_the_line_of_text(run):
    prompt = len(CODEC.encode("x"))
    session = ToySession(script=lambda seen: -1 if seen > prompt + 2 else 40)
    code, out, err = run("--prompt", "x", session=session)
    assert (code, out) == (1, CODEC.decode([40, 40, 40]) + "\n") and "no finite logit" in err


def test_a_fault_of_the_demo_says_where_it_is(monkeypatch, capsys, tmp_path):
    def broken(directory, progress):
        raise BitMTPError("params-00001.safetensors is truncated")

    monkeypatch.setattr(command, "demo_artifact", lambda verbose: tmp_path / "demo")
    monkeypatch.setattr(engine_module, "open_parts", broken)
    assert command.main(["--prompt", "x"]) == 1
    assert f"truncated (the demo is in {tmp_path / 'demo'}: remove it" in capsys.readouterr().err


CHILD = """
    import sys, time
    from toy_session import ToySession
    from bitmtp_tvm import engine, generate
    from bitmtp_tvm.text import TextCodec

    def script(seen):
        time.sleep(float(sys.argv[1]))
        return 40 + seen % 8

    codec = TextCodec(engine.Path(sys.argv[2]), True, 0, 8192)
    parts = engine.Parts(ToySession(10**6, script=script), codec, frozenset())
    engine.open_parts = lambda directory, progress: parts
    sys.exit(generate.main(["--artifact", "x", *sys.argv[3:]]))
"""


def start(delay, *arguments, **changes):
    paths = os.pathsep.join([str(ROOT), str(Path(__file__).parent)])
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(CHILD), str(delay), str(DEMO), *arguments],
        env={**os.environ, "PYTHONPATH": paths, **changes},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


ENDLESS = ["--prompt", "x", "--max-new-tokens", "900000"]


def test_ctrl_c_ends_it_without_a_traceback():
    with start(0.01, *ENDLESS) as child:
        assert child.stdout.read(4)  # text streams before the end
        child.send_signal(signal.SIGINT)
        out, err = child.communicate(timeout=20)
    assert child.returncode == 130 and out.endswith(b"\n")
    assert err == b"interrupted\n"


@pytest.mark.parametrize("more", [[], ["--json"]])
def test_a_reader_that_goes_away_ends_it_without_a_traceback(more):
    with start(0.001, "--prompt", "x", "--max-new-tokens", "300", *more) as child:
        if not more:
            assert child.stdout.read(4)
        child.stdout.close()
        err = child.stderr.read()
        child.wait(timeout=20)
    assert child.returncode != 0 and err == b""


def test_a_character_that_stdout_cannot_show_is_replaced():
    with start(0, "--prompt", "x", "--max-new-tokens", "9", PYTHONIOENCODING="ascii") as child:
        out, err = child.communicate(timeout=20)
    assert child.returncode == 0 and out.isascii() and b"9 new" in err


def test_a_byte_order_mark_before_the_prompts_is_no_prompt(tmp_path):
    path = tmp_path / "prompts"
    path.write_bytes('\ufeff"déjà vu"\n'.encode())
    assert [prompt.content for prompt in command.read_prompt_file(path)] == ["déjà vu"]
