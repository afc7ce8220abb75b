"""What a user says about a checkpoint that its files do not say themselves."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from bitmtp_tvm.errors import BitMTPError, UsageError
from relax_models.quantizers import QUANTIZERS, Quantizer, get_quantizer


@dataclass(frozen=True)
class CheckpointOptions:
    """See `open_checkpoint`; the flags are those of the command line."""

    quant: str | None = None
    quant_threshold: float | None = None
    mask_token_id: int | None = None
    block_size: int | None = None

    def __post_init__(self) -> None:
        """Raise UsageError for a rule that does not exist, or a threshold that it does not take."""
        if self.quant is None and self.quant_threshold is not None:
            raise UsageError("--quant-threshold needs --quant, the rule that it belongs to")
        if self.quant is not None:
            self.quantizer()

    def quantizer(self) -> Quantizer:
        """The rule that `quant` names, with its threshold; only where `quant` is set."""
        try:
            return get_quantizer(str(self.quant), self.quant_threshold)
        except ValueError as fault:
            raise UsageError(f"--quant: {fault}") from fault

    def require_quantizer(self, path: Path) -> Quantizer:
        """As `quantizer`; without `quant` a UsageError that says how to choose one."""
        if self.quant is None:
            raise UsageError(
                f"{path} holds weights that are not quantised yet, and does not say by which rule "
                f"they become low-bit: choose it with --quant, one of {', '.join(QUANTIZERS)}"
            )
        return self.quantizer()

    def refuse_quant(self, path: Path, why: str) -> None:
        """Raise UsageError if `quant` is set: `why` ends the sentence "… is not for PATH: why"."""
        if self.quant is not None:
            raise UsageError(f"--quant {self.quant} is not for {path}: {why}")

    def mtp(self, path: Path, stored: object) -> object:
        """The mtp object of a config: `stored`, the one in the file, completed by the options.

        None when neither says anything. Raises BitMTPError when they contradict each other or one
        of the two numbers is left open: neither is ever guessed.
        """
        given = {
            field.name: getattr(self, field.name)
            for field in fields(self)
            if field.name in ("mask_token_id", "block_size")
            and getattr(self, field.name) is not None
        }
        if not given or (stored is not None and not isinstance(stored, Mapping)):
            return stored
        values: dict[str, Any] = dict(stored or {})
        for name, value in given.items():
            if values.get(name) not in (None, value):
                raise BitMTPError(
                    f"{path} says mtp.{name} {values[name]!r}, but --{name.replace('_', '-')} says "
                    f"{value}"
                )
        values |= given
        missing = {"mask_token_id", "block_size"} - values.keys()
        if missing:
            (name,) = missing
            raise UsageError(
                f"{path} does not say mtp.{name}: give --{name.replace('_', '-')} as well"
            )
        return values
