"""The trace of a decode: what was recorded is what the steps did, and the picture shows it."""

from types import SimpleNamespace

import numpy as np
import pytest
from fake_model import FakeModel, hashed, right, wrong
from lost_signal import Losing, ended_at_once
from twin_session import CHEAP_ROWS, TwinSession, mtp_of

from bitmtp_tvm import engine as engine_module
from bitmtp_tvm import trace as command
from bitmtp_tvm.engine import Parts
from bitmtp_tvm.modes import resolve
from bitmtp_tvm.recording import Recorder, TracedStep
from bitmtp_tvm.trace import record
from bitmtp_tvm.trace_picture import Cell, cells, cut, draw_trace, show
from relax_models.state import Kind, Layout

PROMPT = [1, 2, 3, 4]
RANDOM = hashed(5, 0.8)


def steps_of(mode, quality=RANDOM, count=40, end=(), **options):
    session = TwinSession(FakeModel(128, quality=quality), depth=2)
    parts = Parts(session, None, frozenset(end), CHEAP_ROWS, mtp_of(session.model))
    wanted = resolve(parts.mtp, session.widths, mode=mode, **options)
    return record(parts, PROMPT, count, wanted), session.model


@pytest.mark.parametrize(
    ("mode", "options"),
    [
        ("ar", {}),
        ("confidence", {}),
        ("speculative", {"layout": "chain"}),
        ("speculative", {"layout": "outcomes"}),
        ("hybrid", {"layout": "chain", "min_chain": 2}),
        ("hybrid", {"layout": "outcomes", "min_chain": 2}),
    ],
)
@pytest.mark.parametrize("quality", [right, wrong, RANDOM], ids=["right", "wrong", "random"])
def test_steps_join_to_the_whole_decode(mode, options, quality):
    steps, model = steps_of(mode, quality, **options)
    n, b, drafts = len(PROMPT), len(PROMPT) - 1, ()
    sequence = list(PROMPT)
    for step in steps:
        assert (step.length[0], step.boundary[0]) == (n, b)
        assert list(step.pending) == sequence[b:n]
        assert step.drafts == drafts[: len(step.drafts)]
        tokens = [token for token, _ in step.committed]
        kinds = [kind for _, kind in step.committed]
        assert step.drafts[: step.accepted] == tuple(tokens[: step.accepted])
        expected = [Kind.DRAFT] * step.accepted + [Kind.TARGET]
        assert kinds[: step.accepted + 1] == expected[: len(kinds)]
        assert set(kinds[step.accepted + 1 :]) <= {Kind.UNVERIFIED}
        rows = len(step.pending) + len(step.drafts) + step.masks * step.blocks
        assert step.padding == step.width - rows >= 0
        sequence += tokens
        n, b = step.length[1], step.boundary[1]
        assert n == len(sequence) and b < n
        drafts = () if step.unverified else step.proposed
        if step.unverified:
            assert step.proposed == tuple(tokens[step.accepted + 1 :])
    if mode in ("ar", "speculative"):
        assert sequence[len(PROMPT) :] == model.continuation(PROMPT, 40)
    assert len(sequence) == len(PROMPT) + 40


def test_a_ctrl_c_that_was_lost_ends_the_decode(monkeypatch):
    losing = Losing(Recorder.read)
    monkeypatch.setattr(Recorder, "read", lambda recorder: losing(recorder))
    assert ended_at_once(lambda: steps_of("ar"), losing)


def test_a_wrong_draft_voids_the_masks_of_a_chain_and_not_of_outcomes():
    chain, _ = steps_of("speculative", layout="chain")
    outcomes, _ = steps_of("speculative", layout="outcomes")
    broken = [step for step in chain if step.accepted < len(step.drafts)]
    assert broken and all(step.valid is None and not step.proposed for step in broken)
    several = [step for step in outcomes if step.blocks > 1]
    assert {step.valid for step in several if step.masks} >= {0, 1}
    assert all(step.valid in (step.accepted, None) for step in several)


def test_the_end_is_in_the_trace_and_nothing_behind_it():
    end = FakeModel(128).continuation(PROMPT, 40)[17]
    steps, model = steps_of("speculative", right, end=[end])
    tokens = [token for step in steps for token, _ in step.committed]
    assert tokens == model.continuation(PROMPT, 40)[: tokens.index(end) + 1]
    assert steps[-1].valid is None


CHAIN = TracedStep(
    width=16,
    layout=Layout.CHAIN,
    pending=(1, 2),
    drafts=(3, 4),
    masks=3,
    blocks=1,
    accepted=1,
    valid=None,
    committed=((3, Kind.DRAFT), (5, Kind.TARGET)),
    proposed=(),
    length=(10, 12),
    boundary=(8, 11),
)


def test_cells_show_what_goes_in_and_what_is_used():
    def text(token):
        return f"t{token}"

    assert cells(CHAIN, text) == [
        Cell("pending", "t1"),
        Cell("pending", "t2", "t3"),
        Cell("right", "t3", "t5"),
        Cell("wrong", "t4"),
        *[Cell("void", "mask")] * 3,
    ]
    committed = SimpleNamespace(
        **{
            **vars(CHAIN),
            "accepted": 2,
            "committed": (*CHAIN.committed, (7, Kind.TARGET), (8, Kind.UNVERIFIED)),
            "proposed": (8,),
            "unverified": True,
        }
    )
    assert cells(committed, text)[-3:] == [
        Cell("unverified", "mask", "t8"),
        *[Cell("void", "mask")] * 2,
    ]
    committed.unverified = False
    assert cells(committed, text)[-3] == Cell("mask", "mask", "t8")


def test_tokens_are_shown_on_one_short_line():
    assert show(3, lambda token: " a\n\t b") == "␣a↵⇥␣b"
    assert show(3, lambda token: "") == "#3"
    assert show(3, lambda token: "a\x00\x1b") == "a··"
    assert [cut("abcdef", n) for n in (7, 6, 5, 1, 0)] == ["abcdef", "abcdef", "abcd…", "a…", "a…"]


@pytest.mark.parametrize("layout", ["chain", "outcomes"])
@pytest.mark.filterwarnings("error")
def test_the_picture_is_1600_points_wide(tmp_path, layout):
    pytest.importorskip("matplotlib")
    steps, _ = steps_of("hybrid", layout=layout, min_chain=2, count=20)
    draw_trace(tmp_path / "t.png", steps, lambda token: f"${token}_^$漢", "hybrid")
    picture = (tmp_path / "t.png").read_bytes()
    width, height = np.frombuffer(picture[16:24], ">u4").tolist()
    assert width == 1600
    assert height == pytest.approx(160 * (1.5 + 0.4 * len(steps)), abs=1)


@pytest.fixture
def run(monkeypatch, tmp_path, capsys):
    """The command over the twin session, whose tokens are written as numbers."""

    def run(*arguments, codec=True, context=128):
        session = TwinSession(FakeModel(context, quality=RANDOM), depth=2)
        numbers = SimpleNamespace(
            encode=lambda text: [int(word) for word in text.split()],
            decode=lambda ids: " ".join(map(str, ids)),
        )
        parts = Parts(
            session, numbers if codec else None, frozenset(), CHEAP_ROWS, mtp_of(session.model)
        )
        monkeypatch.setattr(engine_module, "open_parts", lambda directory, progress, graph: parts)
        output = ["-o", str(tmp_path / "t.svg")]
        code = command.main(["--artifact", "somewhere", "--prompt", "1 2 3", *output, *arguments])
        return code, *capsys.readouterr()

    return run


def test_the_command_draws_and_says_what(run, tmp_path):
    pytest.importorskip("matplotlib")
    code, out, err = run("--max-new-tokens", "12", "--mode", "speculative", "--block-size", "4")
    assert (code, err) == (0, "")
    assert out.startswith(f"{tmp_path}/t.svg: 12 tokens in ") and "mode speculative" in out
    assert "<svg" in (tmp_path / "t.svg").read_text()


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((), {"codec": False}, "somewhere has no tokenizer: there is no text to draw"),
        ((), {"context": 3}, "the prompt fills the context, so there is no step to draw"),
        (("--mode", "ar", "--threshold", "0.5"), {}, "threshold means nothing in mode ar"),
        (("--block-size", "9"), {}, "block_size is 9 and the model was trained with"),
    ],
)
def test_what_cannot_be_drawn_is_refused(run, arguments, options, message):
    code, out, err = run(*arguments, **options)
    assert (code, out) == (2, "") and err.startswith(f"error: {message}")


def test_a_picture_needs_matplotlib(run, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    code, _, err = run()
    assert code == 1
    assert err == (
        "error: pictures need matplotlib, which is not installed: pip install 'bitmtp-tvm[plot]'\n"
    )
