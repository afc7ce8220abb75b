"""What a training run is asked for: options of the command, which a recipe may give too."""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from types import UnionType
from typing import Any

from bitmtp_tvm.checkpoint.jsonfile import read_json
from bitmtp_tvm.errors import UsageError
from relax_models.config import BLOCK_ATTENTIONS, PRESETS

RECIPES = Path(__file__).parent / "recipes"
# Of the recipes, those that are several runs.
RUNS = ("ablation", "steps")
OPTIMIZERS = ("adamw", "muon")
SCHEDULES = ("cosine", "wsd")
PARTS = ("all", "masks")
DTYPES = ("bfloat16", "float32")


@dataclass(frozen=True)
class TrainOptions:
    """One run. Lengths are tokens; `warmup` and `decay` are fractions of the budget."""

    output: Path | None = None
    # The model: one of these three.
    model: str | None = None
    preset: str | None = None
    config: dict[str, Any] | None = None
    quant: str | None = None
    quant_threshold: float | None = None
    # The data.
    data: tuple[str, ...] = ()
    validation_data: tuple[str, ...] = ()
    tokenizer: Path | None = None
    cache: Path | None = None
    # The objective.
    mask_token_id: int | None = None
    block_size: int | None = None
    block_attention: str | None = None
    anchors: int | None = None
    mtp_weight: float = 0.3
    mtp_decay: float = 0.85
    kl_share: float = 1.0
    ntp_only: bool = False
    train_only: str = "all"
    # The batches and the budget.
    length: int = 1024
    batch_tokens: int = 65536
    micro_batch: int = 8
    tokens: int | None = None
    minutes: float | None = None
    pause_after: float | None = None
    # The optimiser.
    optimizer: str = "adamw"
    lr: float = 1e-3
    schedule: str = "cosine"
    warmup: float = 0.02
    decay: float = 0.3
    weight_decay: float = 0.1
    clip: float = 1.0
    ema: float | None = None
    seed: int = 0
    # How it runs.
    device: str = "auto"
    dtype: str | None = None
    compile: bool = True
    activation_checkpointing: bool = False
    # What it tells and keeps.
    log_every: int = 10
    validate_every: int = 200
    validation_windows: int = 64
    save_every: float = 5.0
    resume: bool = False
    packed: bool = False
    shard_mb: int = 256
    tensorboard: bool = False

    @property
    def blocks(self) -> int:
        """Mask blocks a window: `anchors`, or one for eight tokens."""
        return max(1, self.length // 8) if self.anchors is None else self.anchors

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        values = asdict(self)
        return {key: _plain(value) for key, value in values.items()}

    def check(self) -> None:
        """Raise UsageError, one sentence, for options that are wrong whatever the files say."""
        if sum(source is not None for source in (self.model, self.preset, self.config)) != 1:
            raise UsageError("give one of --model, --preset and --config: what to train")
        if self.preset is not None and self.preset not in PRESETS:
            raise UsageError(f"--preset {self.preset!r} is not known: {', '.join(PRESETS)}")
        if self.output is None:
            raise UsageError("give --output, the directory of the trained checkpoint")
        if not Path(self.output).resolve().name:
            raise UsageError(f"--output {self.output}: give a directory that has a name")
        if not self.data:
            raise UsageError("give --data: files or directories of text, or tokenised shards")
        if (self.tokens is None) == (self.minutes is None):
            raise UsageError("give the budget: one of --tokens and --minutes")
        _one_of("block-attention", self.block_attention, (None, *BLOCK_ATTENTIONS))
        _one_of("optimizer", self.optimizer, OPTIMIZERS)
        _one_of("schedule", self.schedule, SCHEDULES)
        _one_of("train-only", self.train_only, PARTS)
        _one_of("dtype", self.dtype, (None, *DTYPES))
        self._check_numbers()
        self._check_masks()

    def _check_numbers(self) -> None:
        for name, value in vars(self).items():
            if isinstance(value, float) and not math.isfinite(value):
                raise UsageError(f"{_flag(name)} is {value}; it must be a number")
        for name in _POSITIVE:
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise UsageError(f"{_flag(name)} is {value}; it must be above 0")
        for name in ("warmup", "decay", "mtp_decay", "kl_share", "ema"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= 1:
                raise UsageError(f"{_flag(name)} is {value}; it must lie between 0 and 1")
        for name in ("mtp_weight", "weight_decay", "anchors", "seed"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise UsageError(f"{_flag(name)} is {value}; it must not be negative")
        for name, most in (("seed", (1 << 63) - 1), ("anchors", self.length)):
            value = getattr(self, name)
            if value is not None and value > most:
                raise UsageError(f"{_flag(name)} is {value}; it must be at most {most}")
        if self.tokens is not None and self.tokens < self.batch_tokens:
            raise UsageError(
                f"--tokens {self.tokens} is less than one step, --batch-tokens {self.batch_tokens}"
            )

    def _check_masks(self) -> None:
        if self.train_only == "masks" and (self.ntp_only or not self.blocks):
            raise UsageError("--train-only masks needs mask rows: leave --ntp-only and --anchors 0")
        if not self.ntp_only and not self.blocks:
            raise UsageError("--anchors 0 leaves no mask rows: say --ntp-only if that is meant")


_ONE_OF = (frozenset({"model", "preset", "config"}), frozenset({"tokens", "minutes"}))
_POSITIVE = (
    "length",
    "batch_tokens",
    "micro_batch",
    "tokens",
    "minutes",
    "pause_after",
    "lr",
    "clip",
    "block_size",
    "log_every",
    "validate_every",
    "validation_windows",
    "save_every",
    "shard_mb",
)
# Options that may differ when a run goes on: they change what it tells, not what it computes.
FREE = frozenset({"output", "resume", "pause_after", "log_every", "save_every", "cache"}) | {
    "packed",
    "shard_mb",
    "tensorboard",
    "validate_every",
    "validation_windows",
}


def differing(one: dict[str, Any], two: dict[str, Any]) -> str | None:
    """An option that two runs do not share and should, or None."""
    for name in sorted(one.keys() | two.keys()):
        if name not in FREE and one.get(name) != two.get(name):
            return name
    return None


def read_recipe(name: str) -> dict[str, Any]:
    """The options in a recipe: the name of a shipped one, or a JSON file.

    Raises UsageError for an unknown option or a value of the wrong kind.
    """
    shipped = RECIPES / f"{name}.json"
    path = shipped if shipped.is_file() else Path(name)
    if not path.is_file():
        known = ", ".join(sorted(p.stem for p in RECIPES.glob("*.json") if p.stem not in RUNS))
        raise UsageError(f"--recipe {name!r} is neither a file nor one of: {known}")
    values = read_json(path)
    values.pop("about", None)
    return checked(values, str(path))


def checked(values: dict[str, Any], where: str) -> dict[str, Any]:
    """Options out of a file as `TrainOptions` takes them; UsageError names what does not fit."""
    kinds = {field.name: _kind(field.type) for field in fields(TrainOptions)}
    result = {}
    for name, value in values.items():
        if name not in kinds:
            raise UsageError(f"{where}: there is no option {name!r}")
        if not _fits(value, kinds[name]):
            raise UsageError(f"{where}: {name} is {value!r}; expected {kinds[name]}")
        if "tuple" in kinds[name]:
            value = tuple(value)
        elif "float" in kinds[name] and isinstance(value, int):
            try:
                value = float(value)
            except OverflowError:
                raise UsageError(f"{where}: {name} is too large a number") from None
        elif "Path" in kinds[name] and value is not None:
            value = Path(value)
        result[name] = value
    return result


def combined(recipe: dict[str, Any], given: dict[str, Any]) -> TrainOptions:
    """A recipe with what the command line gives on top; a source of the model replaces another."""
    return replace(TrainOptions(), **over(recipe, given))


def over(values: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """`values` with `given` on top: of options that exclude each other, those that are given."""
    return {**apart(values, given), **given}


def apart(values: Mapping[str, Any], settled: Mapping[str, Any]) -> dict[str, Any]:
    """Those of `values` that leave what is settled as it is."""
    excluded = {name for group in _ONE_OF for name in group if not group.isdisjoint(settled)}
    return {k: v for k, v in values.items() if k not in excluded and k not in settled}


def _kind(annotation: Any) -> str:
    """A type as its names: "int", or "float | None"."""
    parts = getattr(annotation, "__args__", ()) if isinstance(annotation, UnionType) else ()
    return " | ".join(part.__name__ for part in parts or (annotation,)).replace("NoneType", "None")


def _fits(value: Any, kind: str) -> bool:
    names = kind.split(" | ")
    known = {
        "None": value is None,
        "str": isinstance(value, str),
        "Path": isinstance(value, str),
        "bool": isinstance(value, bool),
        "int": isinstance(value, int) and not isinstance(value, bool),
        "float": isinstance(value, int | float) and not isinstance(value, bool),
        "dict": isinstance(value, dict),
        "tuple": isinstance(value, list) and all(isinstance(v, str) for v in value),
    }
    return any(known.get(name, False) for name in names)


def _one_of(name: str, value: Any, known: tuple[Any, ...]) -> None:
    if value not in known:
        shown = ", ".join(str(k) for k in known if k is not None)
        raise UsageError(f"--{name} is {value!r}; known: {shown}")


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _plain(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    return list(value) if isinstance(value, tuple) else value


def to_json(options: TrainOptions) -> str:
    """The options as one line of JSON."""
    return json.dumps(options.to_dict(), sort_keys=True)
