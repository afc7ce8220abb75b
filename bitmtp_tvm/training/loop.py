"""A training run from its options to a checkpoint: steps, validation, saving, going on."""

import json
import math
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bitmtp_tvm.cli import check_stopped
from bitmtp_tvm.errors import BitMTPError, UsageError
from bitmtp_tvm.training import state as states
from bitmtp_tvm.training.batches import Batches, shares
from bitmtp_tvm.training.keeper import Keeper
from bitmtp_tvm.training.logs import TRAINING, VALIDATION, Logs, draw, measure_values
from bitmtp_tvm.training.measures import Measures, measures_of
from bitmtp_tvm.training.objective import Objective, Weights, counts
from bitmtp_tvm.training.optimizers import OPTIMIZERS, Average
from bitmtp_tvm.training.options import TrainOptions, differing
from bitmtp_tvm.training.packing import FLEX_BLOCK
from bitmtp_tvm.training.parallel import World, share, world
from bitmtp_tvm.training.schedule import Budget, Schedule
from bitmtp_tvm.training.setup import find_source, make_model
from bitmtp_tvm.training.sources import prepare

RESULT = "result.json"
# What a run that wrote no state yet may have left.
_TOLD = (TRAINING, VALIDATION, "tensorboard")


@dataclass(frozen=True)
class Result:
    """What a run came to; `finished` is False where it paused."""

    finished: bool
    step: int
    tokens: int
    seconds: float
    measures: Measures | None

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        values = {"step": self.step, "tokens": self.tokens, "seconds": self.seconds}
        return values | (measure_values(self.measures) if self.measures else {})


def train(options: TrainOptions) -> Result:
    """Train as the options say and write the checkpoint into `options.output`.

    Raises UsageError or BitMTPError, one sentence, for what does not fit.
    """
    options.check()
    with world(options.device) as here, _no_empty_folder(Path(str(options.output))):
        return Run(options, here).go()


@contextmanager
def _no_empty_folder(path: Path) -> Iterator[None]:
    """Where the block fails, remove the folder that it made and left empty."""
    new = not path.exists()
    try:
        yield
    except BaseException:
        if new:
            with suppress(OSError):
                path.rmdir()
        raise


class Run:
    """One run in one process of `here`."""

    def __init__(self, options: TrainOptions, here: World) -> None:
        self.options, self.here = options, here
        self.output = Path(str(options.output))
        before = self._earlier()
        self.source = find_source(options)
        self._prepare_data()
        self.decoder = make_model(options, self.source, here)
        self.mtp = self.decoder.config.mtp
        self.compiled = compiled = options.compile and here.device.type == "cuda"
        self._prepare_batches(compiled)
        self._prepare_model(compiled)
        self.schedule = Schedule(options.schedule, options.lr, options.warmup, options.decay)
        self.budget = Budget(options.tokens, options.minutes)
        self.step = self.window = 0
        self.reported = 0, 0.0
        self.measures: Measures | None = None
        self.measured_at = -1
        self.untold: list[Tensor] = []
        if before is not None:
            self._restore(before)
        self.keeper = Keeper(
            options, here, self.source, self.decoder, self.model, self.optimizers, self.average
        )

    def _earlier(self) -> dict[str, Any] | None:
        """The state to go on from. UsageError where output and options do not fit together."""
        path = self.output / states.NAME
        if self.output.exists() and not self.output.is_dir():
            raise UsageError(f"{self.output} is no directory: give another --output")
        if self.options.resume:
            state = states.read(path)
            other = differing(state["options"], self.options.to_dict())
            if other is not None:
                raise UsageError(
                    f"--resume: the run in {self.output} has {other} "
                    f"{state['options'].get(other)!r}, not {self.options.to_dict().get(other)!r}"
                )
            return state
        if path.exists():
            raise UsageError(f"{self.output} holds a run that can go on: --resume, or remove it")
        if (self.output / "config.json").exists():
            raise UsageError(f"{self.output} holds a checkpoint already: give another --output")
        for inside in self.output.iterdir() if self.output.is_dir() else ():
            if inside.name not in _TOLD and not inside.name.startswith("."):
                raise UsageError(f"{inside} is none of a run's files: give another --output")
        return None

    def _prepare_data(self) -> None:
        options, here = self.options, self.here
        output = self.output.resolve()
        cache = options.cache or output.with_name(f"{output.name}.tokens")
        places = (options.data, options.validation_data, self.source.vocabulary, cache, output)
        if here.first:
            self.output.mkdir(parents=True, exist_ok=True)
            prepare(*places)
        here.wait()
        self.data = prepare(*places)

    def _prepare_batches(self, compiled: bool) -> None:
        options, here = self.options, self.here
        whole = options.micro_batch * options.length * here.size
        if options.batch_tokens % whole:
            raise UsageError(
                f"--batch-tokens {options.batch_tokens} is no multiple of --length x --micro-batch "
                f"x processes, {whole}"
            )
        self.micro_batches = options.batch_tokens // whole
        rows = options.blocks * self.mtp.block_size if self.mtp else 0
        if compiled and (options.length % FLEX_BLOCK or rows % FLEX_BLOCK):
            raise UsageError(
                f"--length and --anchors x block size must be multiples of {FLEX_BLOCK} on a GPU, "
                f"not {options.length} and {rows}"
            )
        common = (options.length, options.blocks, self.mtp)
        self.batches = Batches(self.data.train, *common, options.seed, here.device, compiled)
        self.held_out = None
        if self.data.validation is not None:
            try:
                self.held_out = Batches(self.data.validation, *common, 0, here.device, compiled)
            except BitMTPError as fault:
                raise BitMTPError(f"of the validation data, {fault}") from fault

    def _prepare_model(self, compiled: bool) -> None:
        options = self.options
        if compiled:
            # Products of dequantised groups: the rest is bfloat16 or needs all of float32.
            torch.set_float32_matmul_precision("high")
            for layer in self.decoder.model.layers:
                layer.compile(dynamic=False)
        weights = Weights(options.mtp_weight, options.mtp_decay, options.kl_share)
        self.objective = Objective(self.decoder, weights, compiled)
        self.model = share(self.objective, self.here)
        fused = self.here.device.type == "cuda"
        self.optimizers = OPTIMIZERS[options.optimizer](self.model, options, fused)
        self.average = Average(self.model, options.ema) if options.ema else None

    def _restore(self, state: dict[str, Any]) -> None:
        if self.average is not None:
            states.restore_model(state["average"], self.model)
            self.average = Average(self.model, float(self.options.ema or 0))
        states.restore(state, self.model, self.optimizers)
        place = state["place"]
        self.step, self.window = place.step, place.window
        self.budget.tokens, self.budget.seconds = place.tokens, place.seconds
        self.reported = place.tokens, place.seconds
        self.untold = [torch.tensor(losses, device=self.here.device) for losses in place.untold]

    def go(self) -> Result:
        """Steps until the budget is spent or the pause comes."""
        options = self.options
        logs = self._logs()
        self._warm_up()
        start = self.budget.seconds
        began = saved = time.monotonic()
        # The first step of a process compiles: the clock starts behind it.
        clock: float | None = None
        paused = False
        try:
            while not self.budget.over and not paused:
                check_stopped()
                self.untold.append(self._one_step())
                clock = time.monotonic() if clock is None else clock
                now = time.monotonic()
                spans = (now - clock + start, now - began, now - saved)
                self.budget.seconds, elapsed, unsaved = self.here.agreed(spans)
                if self.step % options.log_every == 0 or self.budget.over:
                    self._report(logs)
                if self.step % options.validate_every == 0 and not self.budget.over:
                    self._validate(logs)
                paused = options.pause_after is not None and elapsed >= 60 * options.pause_after
                due = unsaved >= 60 * options.save_every
                if (due or paused) and not self.budget.over:
                    self._keep()
                    saved = time.monotonic()
            return self._end(logs, finished=self.budget.over)
        finally:
            if logs is not None:
                logs.close()

    def _warm_up(self) -> None:
        """Compile what validation runs, before the clock starts."""
        if self.compiled and self.held_out is not None:
            with torch.no_grad():
                self.model(self.held_out(range(self.options.micro_batch)))

    def _logs(self) -> Logs | None:
        if not self.here.first:
            return None
        options = self.options
        tokens = options.tokens is not None
        total = float(options.tokens or 60 * float(options.minutes or 0))
        size = self.mtp.block_size if self.mtp else 0
        unit = "tok" if tokens else "s"
        return Logs(self.output, size, self.step, total, unit, options.tensorboard)

    def _one_step(self) -> Tensor:
        """One optimiser step; returns the losses and the norm of the gradient `(5,)`."""
        options, here = self.options, self.here
        rate = self.schedule.at(self.budget.spent)
        numbers = shares(self.window, self.micro_batches, options.micro_batch, here.rank, here.size)
        batches = [self.batches(part) for part in numbers]
        weights = self.objective.weights
        # Gradients are averaged over processes, so each divides by its share of the whole.
        divisors = here.summed(torch.stack([counts(b, weights) for b in batches]).sum(0))
        divisors = divisors / here.size
        parts = torch.zeros(4, device=here.device)
        for batch in batches:
            loss, shown = self.model(batch, divisors)
            loss.backward()
            parts += shown
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), options.clip)
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        if self.average is not None:
            self.average.update()
        self.step += 1
        self.window += self.micro_batches * options.micro_batch * here.size
        self.budget.tokens += options.batch_tokens
        self.rate = rate
        return torch.cat([here.summed(parts) / here.size, norm.reshape(1)])

    def _report(self, logs: Logs | None) -> None:
        loss, ntp, ce, kl, norm = torch.stack(self.untold).mean(0).tolist()
        if not math.isfinite(loss):
            raise BitMTPError(f"the loss is {loss} at step {self.step}: try a smaller --lr")
        if logs is not None:
            budget, (tokens, seconds) = self.budget, self.reported
            speed = (budget.tokens - tokens) / max(budget.seconds - seconds, 1e-9)
            logs.step(
                {
                    **self._place(),
                    "tokens_per_second": speed,
                    "lr": self.rate,
                    "grad_norm": norm,
                    "loss": loss,
                    "ntp_loss": ntp,
                    "mask_ce": ce,
                    "mask_kl": kl,
                },
                budget.tokens if budget.most_tokens else budget.seconds,
            )
        self.reported = self.budget.tokens, self.budget.seconds
        self.untold.clear()

    def _place(self) -> dict[str, Any]:
        return {"step": self.step, "tokens": self.budget.tokens, "seconds": self.budget.seconds}

    def _validate(self, logs: Logs | None) -> None:
        if self.held_out is None:
            return
        self.measures = self.keeper.averaged(self._measured)
        self.measured_at = self.step
        if logs is not None:
            logs.validation(self._place(), self.measures)

    def _measured(self) -> Measures:
        options, here = self.options, self.here
        each = options.micro_batch * here.size
        batches = -(-min(options.validation_windows, len(self.held_out or ())) // each)
        total: Tensor | None = None
        with torch.no_grad():
            for part in shares(0, batches, options.micro_batch, here.rank, here.size):
                assert self.held_out is not None
                sums, _ = self.model(self.held_out(part))
                total = sums if total is None else total + sums
        assert total is not None
        return measures_of(here.summed(total))

    def _keep(self) -> None:
        """The state to go on from, and the checkpoint as it is now."""
        budget, untold = self.budget, [losses.tolist() for losses in self.untold]
        place = states.Place(self.step, self.window, budget.tokens, budget.seconds, untold)
        self.keeper.write_state(place)
        self.keeper.write_checkpoint(self.budget, self.measures)

    def _end(self, logs: Logs | None, finished: bool) -> Result:
        if finished and self.measured_at != self.step:
            self._validate(logs)
        if finished:
            self.keeper.write_checkpoint(self.budget, self.measures)
        budget = self.budget
        result = Result(finished, self.step, budget.tokens, budget.seconds, self.measures)
        if self.here.first and logs is not None:
            if finished:
                (self.output / RESULT).write_text(json.dumps(result.to_dict(), indent=1) + "\n")
                (self.output / states.NAME).unlink(missing_ok=True)
                if draw(self.output) is None:
                    print("no picture: matplotlib is not installed", file=sys.stderr)
            where = "trained checkpoint" if finished else "paused, go on with --resume"
            logs.say(f"{self.output}: {where}, {budget.tokens / 1e6:.1f} M tokens")
        return result
