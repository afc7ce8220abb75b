"""Record what an artifact answers greedily, and explain where another one answers differently.

`python tests/greedy_trace.py record ARTIFACT PROMPTS TRACE [TOKENS]` where the first artifact runs
(PROMPTS: a JSON list of lists of token ids), then `… compare ARTIFACT TRACE` where the second does.
A difference is explained by the two logits on either side: artifacts for different devices sum in
different orders, so near ties may fall to either token.
"""

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bitmtp_tvm.artifact import check_device, open_artifact
from bitmtp_tvm.session import Session

NEW_TOKENS = 128
KEPT = 8
"""Logits kept of each step: the highest ones, so that the other artifact's choice is among them."""


@dataclass(frozen=True)
class Difference:
    """The first step at which two answers to a prompt part.

    `ours`, `theirs`: the tokens chosen here and in the record; `our_logits`, `their_logits`: what
    this artifact and the recorded one give to those two tokens.
    """

    prompt: int
    step: int
    ours: int
    theirs: int
    our_logits: tuple[float, float]
    their_logits: tuple[float, float]

    def __str__(self) -> str:
        (a, b), (c, d) = self.our_logits, self.their_logits
        where = f"prompt {self.prompt}, step {self.step}"
        return (
            f"{where}: recorded token {self.theirs} ({d:.4f}, the other {c:.4f}, gap {d - c:.4f}), "
            f"here token {self.ours} ({a:.4f}, the other {b:.4f}, gap {a - b:.4f})"
        )


def answer(session: Session, prompt: Sequence[int], steps: int) -> Iterator[np.ndarray]:
    """Logits of each greedy step."""
    session.prefill(prompt[:-1], 0)
    tokens, token = list(prompt), prompt[-1]
    for _ in range(steps):
        at = len(tokens) - 1
        (token,) = session.decode([token], [at], at, None, [0])
        yield session.logits()[0]
        tokens.append(int(token))


def record(
    session: Session, prompts: Sequence[Sequence[int]], new_tokens: int = NEW_TOKENS
) -> list[dict]:
    """For each prompt: itself, and for each step the highest logits, [token, logit], best first."""
    trace = []
    for prompt in prompts:
        steps = []
        for logits in answer(session, prompt, new_tokens):
            best = np.argsort(-logits, kind="stable")[:KEPT]
            steps.append([[int(token), float(logits[token])] for token in best])
        trace.append({"prompt": list(prompt), "steps": steps})
    return trace


def compare(session: Session, trace: Sequence[dict]) -> list[Difference]:
    """The first difference of every prompt whose answer is not the recorded one."""
    found = []
    for number, entry in enumerate(trace):
        answered = answer(session, entry["prompt"], len(entry["steps"]))
        for step, (logits, recorded) in enumerate(zip(answered, entry["steps"], strict=True)):
            ours, theirs = int(logits.argmax()), recorded[0][0]
            if ours != theirs:
                known = dict(map(tuple, recorded))
                found.append(
                    Difference(
                        number,
                        step,
                        ours,
                        theirs,
                        (float(logits[ours]), float(logits[theirs])),
                        (known.get(ours, float("nan")), known[theirs]),
                    )
                )
                break
    return found


def load(directory: Path) -> Session:
    artifact = open_artifact(directory)
    check_device(artifact)
    return Session(artifact)


def main(
    verb: str,
    directory: str,
    source: str,
    target: str | None = None,
    new_tokens: str = str(NEW_TOKENS),
) -> None:
    session = load(Path(directory))
    data = json.loads(Path(source).read_text())
    if verb == "record" and target:
        Path(target).write_text(json.dumps(record(session, data, int(new_tokens))))
        return
    differences = compare(session, data)
    for difference in differences:
        print(difference)
    equal = len(data) - len(differences)
    print(f"{equal} of {len(data)} answers are equal, token by token")


if __name__ == "__main__":
    main(*sys.argv[1:])
