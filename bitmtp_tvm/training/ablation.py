"""Several runs from one file, one after another, and a table of what each came to."""

import csv
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bitmtp_tvm.checkpoint.jsonfile import read_json
from bitmtp_tvm.errors import BitMTPError, UsageError
from bitmtp_tvm.training.options import (
    RECIPES,
    RUNS,
    TrainOptions,
    apart,
    checked,
    combined,
    over,
)

TABLE, SHEET = "ablation.md", "ablation.csv"
_RESULT = "result.json"
_TOKENS = "tokens"


def read_runs(name: str, given: Mapping[str, Any]) -> dict[str, TrainOptions]:
    """The runs of a file (or of a shipped one, by name), each with what the command line gives.

    The file holds `base`, options that all share, and `runs`: a name and what differs. Raises
    UsageError for anything else.
    """
    shipped = RECIPES / f"{name}.json"
    path = shipped if shipped.is_file() else Path(name)
    if not path.is_file():
        raise UsageError(f"--runs {name!r} is neither a file nor one of: {', '.join(RUNS)}")
    values = read_json(path)
    base, runs = values.get("base", {}), values.get("runs")
    if not isinstance(runs, dict) or not runs or not isinstance(base, dict):
        raise UsageError(f"{path} holds no runs: give an object `runs` of names and options")
    if given.get("output") is None:
        raise UsageError("give --output, the directory of all runs")
    output = Path(given["output"])
    result = {}
    for run, changes in runs.items():
        where = f"{path}: {run}"
        named = Path(run).name == run and run not in ("", "..", _TOKENS, TABLE, SHEET)
        if not isinstance(changes, dict) or not named:
            raise UsageError(f"{where} is no name with an object of options")
        recipe = checked(over(base, changes), where)
        own = {**given, "output": output / run, "cache": given.get("cache", output / _TOKENS)}
        # What sets a run apart is not for the command line to undo.
        result[run] = combined(recipe, apart(own, changes))
        result[run].check()
    return result


def run_all(runs: Mapping[str, TrainOptions], output: Path) -> None:
    """Train every run and write the table after each; finished ones are not trained again, and one
    that left a state goes on from it."""
    import torch

    from bitmtp_tvm.training.loop import train
    from bitmtp_tvm.training.state import NAME as STATE

    found: dict[str, dict[str, Any]] = {}
    for name, options in runs.items():
        path = Path(str(options.output)) / _RESULT
        if path.is_file():
            found[name] = read_json(path)
            if not found[name].keys() >= {"tokens", "seconds"}:
                raise BitMTPError(f"{path} is no result of a run: remove it")
            continue
        print(f"run {name}")
        begun = (path.parent / STATE).exists()
        result = train(replace(options, resume=begun))
        found[name] = result.to_dict()
        write_table(found, output)
        # The next run has other shapes; what was compiled and cached for this one is in the way.
        torch.compiler.reset()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    write_table(found, output)


def write_table(found: Mapping[str, Mapping[str, Any]], output: Path) -> None:
    """`ablation.md` and `ablation.csv`: a row a run, a column a number."""
    columns: list[str] = []
    for values in found.values():
        columns += [name for name in values if name not in columns]
    with (output / SHEET).open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, ["run", *columns], lineterminator="\n")
        writer.writeheader()
        writer.writerows({"run": run, **values} for run, values in found.items())
    (output / TABLE).write_text(_markdown(found), encoding="utf-8")


def _markdown(found: Mapping[str, Mapping[str, Any]]) -> str:
    names = ("run", "million tokens", "tokens/s", "validation loss", "accepted length", "accuracy")
    lines = [_row([*names, "agreement"]), _row(["---"] * 7)]
    for run, values in found.items():
        speed = values["tokens"] / max(values["seconds"], 1e-9)
        cells = [run, f"{values['tokens'] / 1e6:.1f}", f"{speed:.0f}"]
        cells += [_number(values, "ntp_loss", 4), _number(values, "accepted_length", 3)]
        cells += [_series(values, name) for name in ("accuracy", "agreement")]
        lines.append(_row(cells))
    return "\n".join(lines) + "\n"


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _number(values: Mapping[str, Any], name: str, digits: int) -> str:
    return f"{values[name]:.{digits}f}" if name in values else ""


def _series(values: Mapping[str, Any], name: str) -> str:
    found = [value for key, value in values.items() if key.startswith(f"{name}_")]
    return " ".join(f"{value:.3f}".lstrip("0") for value in found)
