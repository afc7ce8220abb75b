"""Completions of held-out prompts by a compiled artifact, in every mode, greedy and sampled."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from bitmtp_tvm.engine import Engine
from bitmtp_tvm.evaluation.intervals import Bootstrap, Estimate
from bitmtp_tvm.evaluation.progress import counted
from bitmtp_tvm.generation import Generation
from bitmtp_tvm.mode_rows import WARM_UP_TOKENS, Row, Setting, loops, summary
from relax_models.state import Kind

# Of a sequence of L tokens, the negative natural log-probabilities `(L - 1,)` of all but the first.
Score = Callable[[Sequence[int]], np.ndarray]


@dataclass(frozen=True)
class Sampling:
    """`seed`: of the first prompt; the next ones have the numbers behind it."""

    temperature: float = 0.0
    seed: int = 0

    def at(self, place: int) -> "Sampling":
        """How the prompt of that number is sampled."""
        return replace(self, seed=self.seed + place)


@dataclass(frozen=True)
class Group:
    """All prompts, or those whose text under ar does not loop; `row` adds them up.

    `tokens_per_forward`: the accepted length. `speed`: tokens per second against those of ar.
    `identical`: texts that are those of ar, token for token. `looping`: texts that loop, by
    `mode_rows.loops`. `unverified`: share of the tokens that were committed without a target.
    `perplexity`: of the texts under the ar model, at temperature 1, and `against_ar`, how many
    times that of ar's texts; None where nothing was scored.
    """

    prompts: int
    row: Row
    tokens_per_forward: Estimate
    speed: float
    identical: int
    looping: int
    unverified: float
    perplexity: Estimate | None
    against_ar: Estimate | None

    def to_dict(self) -> dict[str, Any]:
        scored = {"perplexity": self.perplexity, "perplexity_against_ar": self.against_ar}
        return {
            **self.row.to_dict(),
            "prompts": self.prompts,
            "accepted_length": self.tokens_per_forward.to_dict(),
            "speed_against_ar": round(self.speed, 4),
            "identical_to_ar": self.identical,
            "looping": self.looping,
            "unverified": round(self.unverified, 6),
            **{name: one.to_dict() if one else None for name, one in scored.items()},
        }


@dataclass(frozen=True)
class ModeResult:
    """One setting at one temperature; `calm` is None where every text of ar loops."""

    temperature: float
    every: Group
    calm: Group | None

    def to_dict(self) -> dict[str, Any]:
        return {
            "temperature": self.temperature,
            "all": self.every.to_dict(),
            "not_looping": self.calm.to_dict() if self.calm else None,
        }


def complete(
    engine: Engine,
    prompts: Sequence[list[int]],
    settings: Sequence[Setting],
    sampling: Sampling,
    max_new_tokens: int,
    score: Score | None,
) -> list[ModeResult]:
    """Run every setting, of which the first is ar, on every prompt.

    Whether a prompt is calm is decided by ar's text. `score`: of the ar model; a text is scored
    once, however many settings wrote it.
    """
    if settings[0].mode != "ar":
        raise ValueError("the first setting must be ar, which the others are compared with")
    runs = [run_setting(engine, prompts, one, sampling, max_new_tokens) for one in settings]
    texts = [[tuple(run.token_ids) for run in row] for row in runs]
    nll = _scores(engine, prompts, texts, score) if score else None
    calm = [i for i, text in enumerate(texts[0]) if not loops(text)]
    found = []
    for place, setting in enumerate(settings):
        scored = (nll[place], nll[0]) if nll else None
        every, quiet = (
            _group(setting, runs[place], runs[0], scored, part, sampling)
            for part in (range(len(prompts)), calm)
        )
        assert every is not None
        found.append(ModeResult(sampling.temperature, every, quiet))
    return found


def run_setting(
    engine: Engine,
    prompts: Sequence[list[int]],
    setting: Setting,
    sampling: Sampling,
    max_new_tokens: int,
) -> list[Generation]:
    """The finished generations of one setting; each prompt is computed whole."""

    warm_up = min(WARM_UP_TOKENS, max_new_tokens)
    run_one(engine, prompts[0], setting, sampling, warm_up)
    what = f"{setting.mode} at {sampling.temperature:g}"
    return [
        run_one(engine, prompt, setting, sampling.at(place), max_new_tokens)
        for place, prompt in counted(enumerate(prompts), what, len(prompts))
    ]


def run_one(
    engine: Engine,
    prompt: list[int],
    setting: Setting,
    sampling: Sampling,
    max_new_tokens: int,
    stop: Sequence[str] = (),
) -> Generation:
    """A finished generation; the prompt is computed whole."""
    engine.reset()
    run = engine.generate(
        prompt,
        max_new_tokens,
        mode=setting.mode,
        block_size=setting.block_size,
        layout=setting.layout,
        temperature=sampling.temperature,
        seed=sampling.seed,
        stop=stop,
    )
    run.result()
    return run


def _scores(
    engine: Engine, prompts: Sequence[list[int]], texts: list[list[tuple[int, ...]]], score: Score
) -> list[np.ndarray]:
    """Of every setting `(prompts,)`: the summed nll of its texts behind their prompts."""
    known: dict[tuple[int, tuple[int, ...]], float] = {}
    engine.reset()
    every = [(i, text) for row in texts for i, text in enumerate(row)]
    for i, text in counted(list(dict.fromkeys(every)), "scoring", len(set(every))):
        known[i, text] = float(score([*prompts[i], *text])[len(prompts[i]) - 1 :].sum())
    # The score may have used the engine's own storage.
    engine.reset()
    return [np.array([known[i, text] for i, text in enumerate(row)]) for row in texts]


def _group(
    setting: Setting,
    runs: list[Generation],
    plain: list[Generation],
    nll: tuple[np.ndarray, np.ndarray] | None,
    part: Sequence[int],
    sampling: Sampling,
) -> Group | None:
    """The prompts `part` of one setting, beside those of ar; None for no prompt."""
    if not part:
        return None
    ours, theirs = [runs[i] for i in part], [plain[i] for i in part]
    bootstrap = Bootstrap(len(part), sampling.seed)
    texts = [run.token_ids for run in theirs]
    row, ar = (summary(setting, some, texts, None) for some in (ours, theirs))
    perplexity = against = None
    if nll is not None:
        sums = nll[0][list(part)], nll[1][list(part)]
        perplexity, against = _perplexities(bootstrap, sums, _tokens(ours), _tokens(theirs))
    forwards = np.array([run.stats.forwards for run in ours], np.float64)
    unverified = sum(run.stats.kinds[Kind.UNVERIFIED] for run in ours)
    return Group(
        len(part),
        row,
        bootstrap.ratio(_tokens(ours), forwards),
        row.tokens_per_second / ar.tokens_per_second if ar.tokens_per_second else 0.0,
        sum(run.token_ids == text for run, text in zip(ours, texts, strict=True)),
        sum(loops(run.token_ids) for run in ours),
        unverified / row.tokens if row.tokens else 0.0,
        perplexity,
        against,
    )


def _tokens(runs: Sequence[Generation]) -> np.ndarray:
    return np.array([run.stats.new_tokens for run in runs], np.float64)


def _perplexities(
    bootstrap: Bootstrap, nll: tuple[np.ndarray, np.ndarray], ours: np.ndarray, ars: np.ndarray
) -> tuple[Estimate, Estimate]:
    """Of a setting's texts, and against that of ar's; nll: of both, summed over `ours` and `ars`
    tokens of each prompt."""
    return (
        bootstrap.statistic(lambda a, n: np.exp(a / n), nll[0], ours),
        bootstrap.statistic(lambda a, n, b, m: np.exp(a / n - b / m), nll[0], ours, nll[1], ars),
    )
