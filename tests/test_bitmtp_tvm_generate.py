import json
import os
import re
import signal
import subprocess
import sys
import textwrap
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from fake_model import FakeModel
from twin_session import CHEAP_ROWS, TwinSession, mtp_of

import bitmtp_tvm
from bitmtp_tvm import engine as engine_module
from bitmtp_tvm import generate as command
from bitmtp_tvm.chat import ChatTemplate
from bitmtp_tvm.engine import Parts
from bitmtp_tvm.errors import BitMTPError
from bitmtp_tvm.generation import Generation
from bitmtp_tvm.text import TextCodec

ROOT = Path(bitmtp_tvm.__file__).parents[1]
DEMO = ROOT / "bitmtp_tvm" / "assets" / "demo" / "tokenizer.json"
CODEC = TextCodec(DEMO, add_bos=True, bos_token_id=0, vocab_size=8192)


def session_of(**model):
    return TwinSession(FakeModel(vocab_size=8192, **model), depth=2)


def continuation(prompt, count):
    return session_of().model.continuation(prompt, count)


@pytest.fixture
def run(monkeypatch, capsys):
    """Run the command over the twin session; gives (exit code, stdout, stderr)."""

    def run(*arguments, session=None, codec=CODEC, eos=(1,), chat=None, mtp=False, measured=True):
        session = session or session_of()
        predicts = mtp_of(session.model) if mtp else None
        times = replace(CHEAP_ROWS, measured=measured)
        parts = Parts(session, codec, frozenset(eos), times, predicts, chat)
        run.graphs = []

        def open_parts(directory, progress, graph):
            run.graphs.append(graph)
            return parts

        monkeypatch.setattr(engine_module, "open_parts", open_parts)
        code = command.main(["--artifact", "somewhere", *arguments])
        return code, *capsys.readouterr()

    return run


def text_of(prompt, count):
    return CODEC.decode(continuation(CODEC.encode(prompt), count))


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
    assert (code, out) == (0, ",".join(map(str, continuation([1, 2, 3], 4))) + "\n")
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
        assert answer["token_ids"] == continuation(CODEC.encode(prompt), 6)
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
    ids = continuation([5], 2)
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
    session = session_of()
    code, out, err = run(*arguments, session=session)
    assert (code, out) == (2, "") and message in err and err.count("\n") == 1
    assert session.calls == []


def test_an_end_token_stops(run):
    second = continuation(CODEC.encode("hello"), 2)[1]
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
    session = session_of()
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
    session = session_of()
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
        ["--prompt", "a", "--mode", "greedy"],
        ["--prompt", "a", "--layout", "tree"],
        ["--prompt", "a", "--block-size", "0"],
        ["--prompt", "a", "--threshold", "high"],
        ["--prompt", "a", "--seed", "1.5"],
        ["--prompt", "a", "--top-k", "many"],
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
    session = session_of(script={prompt: 40, prompt + 1: 40, prompt + 2: 40, prompt + 3: -1})
    code, out, err = run("--prompt", "x", session=session)
    assert (code, out) == (1, CODEC.decode([40, 40, 40]) + "\n") and "no finite logit" in err


def test_a_fault_of_the_demo_says_where_it_is(monkeypatch, capsys, tmp_path):
    def broken(directory, progress, graph):
        raise BitMTPError("params-00001.safetensors is truncated")

    monkeypatch.setattr(command, "demo_artifact", lambda verbose: tmp_path / "demo")
    monkeypatch.setattr(engine_module, "open_parts", broken)
    assert command.main(["--prompt", "x"]) == 1
    assert f"truncated (the demo is in {tmp_path / 'demo'}: remove it" in capsys.readouterr().err


def test_a_model_with_mtp_says_how_many_tokens_a_forward_gives(run):
    code, out, err = run("--prompt", "hello", "--max-new-tokens", "20", mtp=True)
    assert (code, out) == (0, text_of("hello", 20) + "\n")
    rate = re.search(r"20 new; (\d\.\d\d) tokens per forward; \d", err)
    assert rate and float(rate[1]) > 3
    code, out, err = run("--prompt", "hello", "--max-new-tokens", "20", "--mode", "ar", mtp=True)
    assert (code, out) == (0, text_of("hello", 20) + "\n") and "forward" not in err


@pytest.mark.parametrize(
    "arguments",
    [
        ["--mode", "speculative", "--block-size", "3", "--draft-threshold", "0.7"],
        ["--mode", "speculative", "--layout", "outcomes"],
        ["--mode", "confidence", "--threshold", "0.95"],
        ["--mode", "hybrid", "--min-chain", "4", "--layout", "chain"],
    ],
)
def test_every_mode_can_be_asked_for(run, arguments):
    code, out, _ = run("--prompt-ids", "5,6", "--json", "--max-new-tokens", "30", *arguments, mtp=1)
    answer = json.loads(out)
    assert code == 0 and answer["token_ids"] == continuation([5, 6], 30)
    assert answer["stats"]["forwards"] < 16


@pytest.mark.parametrize(
    ("arguments", "mtp", "message"),
    [
        (["--mode", "speculative"], False, "needs a model with multi-token prediction"),
        (["--mode", "hybrid", "--min-chain", "3"], False, "use mode ar"),
        (["--min-chain", "3"], True, "min_chain means nothing in mode speculative"),
        (["--block-size", "3"], False, "block_size means nothing in mode ar"),
        (["--block-size", "9"], True, "more, never"),
        (["--draft-threshold", "nan"], True, "draft_threshold is nan"),
        (["--temperature=-1"], True, "temperature"),
        (["--top-p", "1.5"], False, "top_p"),
        (["--stop", ""], False, "no stop string"),
        (["--logprobs"], False, "give --json with it"),
    ],
)
def test_options_that_cannot_be_served_are_one_sentence(run, arguments, mtp, message):
    session = session_of()
    code, out, err = run("--prompt", "x", *arguments, mtp=mtp, session=session)
    assert (code, out) == (2, "") and message in err and err.count("\n") == 1
    assert err.startswith("error: ") and session.calls == []


def test_stop_texts_end_the_text(run):
    whole = text_of("hello", 20)
    stops = whole[9:12], whole[6:8]
    arguments = ["--prompt", "hello", "--max-new-tokens", "20"]
    code, out, err = run(*arguments, "--stop", stops[0], "--stop", stops[1])
    assert (code, out) == (0, whole[: whole.index(stops[1])] + "\n") and "finish: stop" in err
    answer = json.loads(run(*arguments, "--stop", stops[0], "--json")[1])
    assert answer["text"] == whole[: whole.index(stops[0])] and answer["finish_reason"] == "stop"


def test_a_seed_gives_the_same_text_and_logprobs_come_when_asked_for(run):
    arguments = ["--prompt", "x", "--json", "--temperature", "1", "--max-new-tokens", "9"]
    more = ["--top-k", "50", "--top-p", "0.9", "--min-p", "0.00001", "--repetition-penalty", "1.1"]

    def draw(seed, *rest):
        session = session_of(sharpness=0.5)
        return json.loads(run(*arguments, *more, "--seed", seed, *rest, session=session)[1])

    answer = draw("7", "--logprobs")
    assert list(answer) == ["text", "token_ids", "logprobs", "finish_reason", "stats"]
    assert len(answer["logprobs"]) == 9 and max(answer["logprobs"]) < 0
    assert draw("7")["token_ids"] == answer["token_ids"] and "logprobs" not in draw("7")
    assert draw("8")["token_ids"] != answer["token_ids"]


def test_graphs_are_left_out_when_asked(run):
    run("--prompt", "x", "--max-new-tokens", "1")
    assert run.graphs == [True]
    run("--prompt", "x", "--max-new-tokens", "1", "--no-graph")
    assert run.graphs == [False]


@pytest.mark.parametrize(("measured", "word"), [(True, "measured"), (False, "predicted")])
def test_verbose_says_which_step_times_are_used(run, measured, word):
    arguments = ["--prompt", "x", "--max-new-tokens", "1"]
    assert f"step times: {word}" in run(*arguments, "--verbose", measured=measured)[2]
    assert "step times" not in run(*arguments, measured=measured)[2]


CHILD = """
    import sys, time
    from fake_model import FakeModel
    from twin_session import CHEAP_ROWS, TwinSession
    from bitmtp_tvm import engine, generate
    from bitmtp_tvm.text import TextCodec

    class Slow(FakeModel):
        def forward(self, rows):
            time.sleep(float(sys.argv[1]))
            return super().forward(rows)

    codec = TextCodec(engine.Path(sys.argv[2]), True, 0, 8192)
    session = TwinSession(Slow(10**6, 8192, script={n: 40 + n % 8 for n in range(400)}))
    parts = engine.Parts(session, codec, frozenset(), CHEAP_ROWS)
    engine.open_parts = lambda directory, progress, graph: parts
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


@pytest.mark.parametrize(
    "asked", [("--prompt", "x"), ("--prompt", "x", "--json"), ("--prompt-ids", "5")]
)
def test_a_signal_whose_exception_was_lost_ends_it_as_well(run, monkeypatch, asked):
    """As when numpy looks for an attribute: what is raised there is dropped."""
    seen, read = [], Generation._read

    def reading(generation):
        for event in read(generation):
            with suppress(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
            seen.append(event)
            yield event

    monkeypatch.setattr(Generation, "_read", reading)
    code, _, err = run(*asked, "--max-new-tokens", "50")
    assert (code, err) == (130, "interrupted\n")
    assert len(seen) < 10


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
