"""One evaluation, part by part: prediction on held-out text, completions, HumanEval."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from bitmtp_tvm.errors import UsageError
from bitmtp_tvm.evaluation import held_out
from bitmtp_tvm.evaluation.completions import Sampling, complete
from bitmtp_tvm.evaluation.held_out import Vocabulary, read_held_out
from bitmtp_tvm.evaluation.human_eval import Problem, read_problems, solve
from bitmtp_tvm.evaluation.prediction import Prediction, compare, measure
from bitmtp_tvm.evaluation.progress import counted
from bitmtp_tvm.evaluation.report import Report
from bitmtp_tvm.evaluation.rows import RowModel, choose_anchors
from bitmtp_tvm.evaluation.sandbox import Limits
from bitmtp_tvm.evaluation.sources import CompiledModel, check_length, check_same_tokens
from bitmtp_tvm.generate import read_prompt_file
from bitmtp_tvm.mode_rows import Setting, settings
from bitmtp_tvm.modes import MODES, resolve

if TYPE_CHECKING:
    from bitmtp_tvm.evaluation.torch_rows import TorchRows

SOLUTION_TOKENS = 512
"""Of a HumanEval solution at most."""


@dataclass
class Work:
    """See the options of the same names in `bitmtp_tvm.evaluate`."""

    model: Path | None
    baseline: Path | None
    artifact: Path | None
    data: Sequence[Path]
    windows: int
    length: int
    anchors: int
    device: str
    quant: str | None
    quant_threshold: float | None
    prompts: Path | None
    completions: int
    prompt_tokens: int
    max_new_tokens: int
    temperatures: Sequence[float]
    modes: Sequence[str]
    block_sizes: Sequence[int] | None
    layouts: Sequence[str]
    graph: bool
    human_eval: bool
    problems: Path | None
    seed: int

    def fill(self, report: Report) -> None:
        """Measure everything that was asked for; what cannot be served is refused before."""
        problems = read_problems(self.problems) if self.human_eval else []
        wanted = self._settings() if self.compiled else []
        windows = self._windows() if self.data and self.windows else None
        baseline = self._baseline() if self.baseline else None
        prompts = self._prompts() if self.compiled else []
        for part in (self.checkpoint[0] if self.checkpoint else None, self.compiled):
            report.about.update(part.about() if part else {})
        if windows is not None:
            self._predict(report, windows, baseline)
        if prompts:
            self._complete(report, prompts, wanted)
        if problems:
            self._solve(report, problems, wanted)

    @cached_property
    def compiled(self) -> CompiledModel | None:
        return CompiledModel(self.artifact, self.graph) if self.artifact else None

    @cached_property
    def checkpoint(self) -> "tuple[TorchRows, Vocabulary] | None":
        return self._open(self.model) if self.model else None

    def _open(self, directory: Path) -> "tuple[TorchRows, Vocabulary]":
        # Here and not above: an artifact is evaluated without what reads checkpoints.
        from bitmtp_tvm.evaluation.checkpoint import open_checkpoint_rows

        return open_checkpoint_rows(directory, self.device, self.quant, self.quant_threshold)

    @cached_property
    def source(self) -> RowModel:
        """What predicts, and what texts are scored by: the checkpoint where there is one."""
        if self.checkpoint is None:
            assert self.compiled is not None
            return self.compiled.rows()
        if self.compiled is not None:
            check_same_tokens(self.checkpoint[0], self.compiled.rows())
        return self.checkpoint[0]

    @cached_property
    def vocabulary(self) -> Vocabulary:
        if self.checkpoint is not None:
            return self.checkpoint[1]
        assert self.compiled is not None
        return self.compiled.vocabulary

    @cached_property
    def tokens(self) -> np.ndarray:
        return read_held_out(self.data, self.vocabulary)

    def _windows(self) -> np.ndarray:
        check_length(self.source, self.length)
        choose_anchors(1, self.length, self.source.masks, self.anchors, self.seed)
        return held_out.windows(self.tokens, self.length, self.windows, self.seed, self.vocabulary)

    def _baseline(self) -> RowModel:
        assert self.baseline is not None
        found, _ = self._open(self.baseline)
        check_same_tokens(self.source, found)
        check_length(found, self.length)
        return found

    def _predict(self, report: Report, windows: np.ndarray, baseline: RowModel | None) -> None:
        found = self._measure(self.source, windows, self.anchors)
        report.predictions.append(found)
        if baseline is None:
            return
        # Its mask rows, if it has any, mean nothing.
        plain = self._measure(baseline, windows, 0)
        report.predictions.append(plain)
        report.cost = compare(found, plain, self.seed)

    def _measure(self, model: RowModel, windows: np.ndarray, anchors: int) -> Prediction:
        chosen = choose_anchors(len(windows), windows.shape[1], model.masks, anchors, self.seed)
        rows = model.rows(windows, chosen)
        return measure(model.name, counted(rows, "windows", len(windows)), self.seed)

    def _prompts(self) -> list[list[int]]:
        """Token ids of what is completed; `UsageError` for a prompt that cannot be served."""
        assert self.compiled is not None
        found = self._pieces() if self.prompts is None else self._lines()
        longest, context = max(map(len, found), default=0), self.compiled.engine.session.context
        if longest >= context:
            raise UsageError(
                f"a prompt of {longest} tokens, with the one that begins a text, leaves no room in "
                f"a context of {context}: give shorter ones"
            )
        return found

    def _pieces(self) -> list[list[int]]:
        if not self.data or not self.completions:
            return []
        count, size = self.completions, self.prompt_tokens
        return held_out.prompts(self.tokens, size, count, self.seed, self.vocabulary)

    def _lines(self) -> list[list[int]]:
        assert self.compiled is not None and self.prompts is not None
        found = []
        for prompt in read_prompt_file(self.prompts):
            try:
                found.append(self.compiled.engine.encode(prompt.content))
            except UsageError as fault:
                raise UsageError(f"{prompt.source}{fault}") from fault
        return found

    def _settings(self) -> list[Setting]:
        """ar, then the modes that were asked for; `UsageError` for what the model does not do."""
        assert self.compiled is not None
        manifest = self.compiled.manifest
        mtp = manifest.config.get("mtp")
        if mtp is None:
            if self.block_sizes or tuple(self.modes) not in (MODES, ("ar",)):
                raise UsageError(
                    f"{self.artifact} was trained without multi-token prediction: ar is its only "
                    "mode"
                )
            return [Setting("ar")]
        sizes = self.block_sizes or (int(mtp["block_size"]),)
        modes = ("ar", *self.modes)
        found = [one for one in settings(sizes, self.layouts) if one.mode in modes]
        for setting in found:
            resolve(mtp, manifest.widths, **asdict(setting))
        return found

    def _complete(
        self, report: Report, prompts: list[list[int]], wanted: Sequence[Setting]
    ) -> None:
        assert self.compiled is not None
        for temperature in self.temperatures:
            report.completions += complete(
                self.compiled.engine,
                prompts,
                wanted,
                Sampling(temperature, self.seed),
                self.max_new_tokens,
                self.source.nll,
            )

    def _solve(
        self, report: Report, problems: Sequence[Problem], wanted: Sequence[Setting]
    ) -> None:
        assert self.compiled is not None
        engine = self.compiled.engine
        prompts = [engine.encode(problem.asked) for problem in problems]
        sampling = Sampling(0.0, self.seed)
        report.human_eval = solve(
            engine, problems, prompts, wanted, sampling, SOLUTION_TOKENS, Limits()
        )
