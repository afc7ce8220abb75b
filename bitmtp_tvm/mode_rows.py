"""The ways to decode, side by side on the same prompts: tokens per forward and per second."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import numpy as np

from bitmtp_tvm.cli import check_stopped
from bitmtp_tvm.generation import Generation
from bitmtp_tvm.modes import READ
from bitmtp_tvm.step_times import StepTimes

WARM_UP_TOKENS = 32
"""Before a setting is timed: graphs are captured, and the policy has seen some drafts."""

PROMPTS = (
    "def fibonacci(n):\n",
    "import json\n\n\ndef load_config(path):\n",
    "class Stack:\n    def __init__(self):\n",
    "def test_parse_header():\n",
    "The capital of France is",
    "Once upon a time there was a fisherman who",
    "To make bread, first mix the flour with",
    "Question: Why is the sky blue?\nAnswer:",
)

LOOP_TOKENS, LOOP_PERIOD = 48, 24
"""A text loops when its last LOOP_TOKENS repeat with a period of at most LOOP_PERIOD."""


class Generator(Protocol):
    """What is needed of an engine."""

    def generate(
        self,
        prompt: Sequence[int],
        max_new_tokens: int,
        *,
        mode: str | None,
        block_size: int | None,
        layout: str,
    ) -> Generation: ...

    def reset(self) -> None: ...


@dataclass(frozen=True)
class Setting:
    """One way to decode; what the mode does not read is left at its default."""

    mode: str
    block_size: int | None = None
    layout: str = "auto"


def settings(block_sizes: Sequence[int], layouts: Sequence[str]) -> list[Setting]:
    """ar first, then every other mode with every block size, and layout where it reads one."""
    found = [Setting("ar")]
    for mode in ("confidence", "speculative", "hybrid"):
        for block_size in block_sizes:
            named = layouts if "layout" in READ[mode] else ("auto",)
            found += [Setting(mode, block_size, layout) for layout in named]
    return found


@dataclass(frozen=True)
class Row:
    """What a setting did with all prompts together.

    `equal`: share of the tokens that stand where ar has them, `prefix`: share before the first
    difference; 1 and 1 is ar's very text. `drafts_right`: of the drafts that were compared with
    their target, None without any. `host_gap`: share of the decoding time that is not in the steps
    of the table, None for a predicted one. `rates`: tokens per second of each prompt.
    """

    setting: Setting
    tokens: int
    forwards: int
    seconds: float
    equal: float
    prefix: float
    drafts_right: float | None
    host_gap: float | None
    steps: dict[int, int]
    rates: tuple[float, ...]

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def tokens_per_forward(self) -> float:
        return self.tokens / self.forwards if self.forwards else 0.0

    def to_dict(self) -> dict[str, Any]:
        low, high = np.percentile(self.rates, (10, 90)).tolist() if self.rates else (0.0, 0.0)
        return {
            **asdict(self.setting),
            "tokens": self.tokens,
            "forwards": self.forwards,
            "seconds": round(self.seconds, 6),
            "tokens_per_forward": round(self.tokens_per_forward, 3),
            "tokens_per_second": round(self.tokens_per_second, 2),
            "tokens_per_second_spread": [round(low, 2), round(high, 2)],
            "equal_to_ar": round(self.equal, 4),
            "before_first_difference": round(self.prefix, 4),
            "drafts_right": None if self.drafts_right is None else round(self.drafts_right, 4),
            "host_gap": None if self.host_gap is None else round(self.host_gap, 4),
            "steps_by_bucket": {str(w): n for w, n in sorted(self.steps.items())},
        }


@dataclass(frozen=True)
class Comparison:
    """Rows of all prompts, rows of those whose text under ar does not loop, and which loop."""

    every: list[Row]
    calm: list[Row]
    looping: list[bool]

    def to_dict(self) -> dict[str, Any]:
        return {
            "prompts": len(self.looping),
            "looping": sum(self.looping),
            "rows": [row.to_dict() for row in self.every],
            "rows_without_loops": [row.to_dict() for row in self.calm],
        }


def compare(
    engine: Generator,
    prompts: Sequence[list[int]],
    wanted: Sequence[Setting],
    max_new_tokens: int,
    times: StepTimes | None,
) -> Comparison:
    """Run every setting on every prompt.

    prompts: token ids; `wanted` begins with ar, whose text the others are compared with; `times`:
    t(W) as these steps run, None where unknown.
    """
    found = Comparison([], [], [])
    reference: list[tuple[int, ...]] = []
    for setting in wanted:
        runs = _runs(engine, prompts, setting, max_new_tokens)
        if not reference:
            reference = [tuple(run.token_ids) for run in runs]
            found.looping.extend(loops(tokens) for tokens in reference)
        found.every.append(summary(setting, runs, reference, times))
        calm = [i for i, looping in enumerate(found.looping) if not looping]
        kept, against = [runs[i] for i in calm], [reference[i] for i in calm]
        found.calm.append(summary(setting, kept, against, times))
    return found


def _runs(
    engine: Generator, prompts: Sequence[list[int]], setting: Setting, max_new_tokens: int
) -> list[Generation]:
    def generate(prompt: Sequence[int], tokens: int) -> Generation:
        check_stopped()
        engine.reset()
        run = engine.generate(
            prompt,
            tokens,
            mode=setting.mode,
            block_size=setting.block_size,
            layout=setting.layout,
        )
        run.result()
        return run

    generate(prompts[0], min(WARM_UP_TOKENS, max_new_tokens))
    return [generate(prompt, max_new_tokens) for prompt in prompts]


def summary(
    setting: Setting,
    runs: Sequence[Generation],
    reference: Sequence[Sequence[int]],
    times: StepTimes | None,
) -> Row:
    """Add up the generations of one setting; reference: ar's tokens for the same prompts."""
    stats = [run.stats for run in runs]
    steps: dict[int, int] = {}
    for one in stats:
        for width, count in one.steps.items():
            steps[width] = steps.get(width, 0) + count
    seconds = sum(one.decode_seconds for one in stats)
    pairs = [(run.token_ids, tokens) for run, tokens in zip(runs, reference, strict=True)]
    length = sum(max(len(a), len(b)) for a, b in pairs)
    evaluated = sum(sum(one.evaluated) for one in stats)
    return Row(
        setting,
        tokens=sum(one.new_tokens for one in stats),
        forwards=sum(one.forwards for one in stats),
        seconds=seconds,
        equal=sum(equal(a, b) for a, b in pairs) / length if length else 1.0,
        prefix=sum(common(a, b) for a, b in pairs) / length if length else 1.0,
        drafts_right=sum(sum(one.accepted) for one in stats) / evaluated if evaluated else None,
        host_gap=host_gap(steps, seconds, times),
        steps=steps,
        rates=tuple(one.tokens_per_second for one in stats),
    )


def equal(tokens: Sequence[int], others: Sequence[int]) -> int:
    """Places where both have the same token."""
    return sum(a == b for a, b in zip(tokens, others, strict=False))


def common(tokens: Sequence[int], others: Sequence[int]) -> int:
    """Places before the first difference."""
    shorter = min(len(tokens), len(others))
    return next((i for i in range(shorter) if tokens[i] != others[i]), shorter)


def host_gap(steps: Mapping[int, int], seconds: float, times: StepTimes | None) -> float | None:
    """Share of `seconds` in which no step can have run, by t(W); None without measured times."""
    if times is None or not times.measured or not seconds:
        return None
    busy = sum(count * times.milliseconds[width] for width, count in steps.items()) / 1000
    return 1 - busy / seconds


def loops(tokens: Sequence[int]) -> bool:
    """Whether the text ended in repeating itself, which inflates tokens per forward."""
    tail = list(tokens[-LOOP_TOKENS:])
    return len(tail) == LOOP_TOKENS and any(
        tail[period:] == tail[:-period] for period in range(1, LOOP_PERIOD + 1)
    )


HEADER = (
    "mode          block  layout    tok/forward     tok/s  (10-90 %)        vs ar  equal  prefix"
    "  right   gap"
)


def table(rows: Sequence[Row]) -> list[str]:
    """Lines to print; the first row is ar, which the others are compared with."""
    plain = rows[0].tokens_per_second
    return [HEADER, *(_line(row, plain) for row in rows)]


def _line(row: Row, plain: float) -> str:
    shown, setting = row.to_dict(), row.setting
    layout = setting.layout if "layout" in READ[setting.mode] else ""
    low, high = shown["tokens_per_second_spread"]
    gain = row.tokens_per_second / plain if plain else 0.0
    return (
        f"{setting.mode:<12}  {setting.block_size or '':>5}  {layout:<8}"
        f"  {row.tokens_per_forward:>11.2f}  {row.tokens_per_second:>8.1f}"
        f"  {f'({low:.0f}-{high:.0f})':<14}  {gain:>4.2f}x"
        f"  {row.equal:>5.3f}   {row.prefix:>5.3f}"
        f"  {_share(row.drafts_right):>5}  {_share(row.host_gap):>4}"
    )


def _share(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.0f} %"
