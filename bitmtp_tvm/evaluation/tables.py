"""What was found, as tables: for a terminal and for Markdown."""

from collections.abc import Sequence
from dataclasses import dataclass

from bitmtp_tvm.evaluation.calibration import SURE
from bitmtp_tvm.evaluation.completions import Group, ModeResult
from bitmtp_tvm.evaluation.human_eval import Solved
from bitmtp_tvm.evaluation.intervals import LEVEL, Estimate
from bitmtp_tvm.evaluation.prediction import Cost, Prediction
from bitmtp_tvm.mode_rows import LOOP_PERIOD, LOOP_TOKENS, Setting
from bitmtp_tvm.modes import READ

INTERVAL = f"in brackets: {LEVEL:.0%} bootstrap intervals"


@dataclass(frozen=True)
class Table:
    """A title, a header, rows of as many cells, and sentences below."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = ()

    def text(self) -> str:
        """Columns side by side; the first one stands left, numbers right."""
        lines = [self.header, *self.rows]
        widths = [max(len(line[i]) for line in lines) for i in range(len(self.header))]
        made = [
            "  ".join(
                cell.rjust(width) if i else cell.ljust(width)
                for i, (cell, width) in enumerate(zip(line, widths, strict=True))
            ).rstrip()
            for line in lines
        ]
        return "\n".join([self.title, *(f"  {line}" for line in [*made, *self.notes])])

    def markdown(self) -> str:
        rule = ["---", *["---:"] * (len(self.header) - 1)]
        rows = ["| " + " | ".join(line) + " |" for line in [self.header, rule, *self.rows]]
        notes = [f"\n{note[:1].upper()}{note[1:]}." for note in self.notes]
        return "\n".join([f"### {self.title}\n", *rows, *notes]) + "\n"


def prediction_table(found: Sequence[Prediction]) -> Table:
    """Next tokens, a model a row."""
    first = found[0]
    rows = [
        [one.model, one.loss.text(4), one.perplexity.text(2), one.accuracy.text()] for one in found
    ]
    note = f"{len(first.counts)} windows, {int(first.counts.sum())} tokens; {INTERVAL}"
    return Table("Next token", ["model", "loss, nats", "perplexity", "right"], rows, [note])


def cost_line(cost: Cost) -> str:
    """`joint costs 0.31 % (0.12-0.50) of the baseline's loss …`."""
    share, difference = cost.share.text(2, 100), cost.difference.text(4)
    return (
        f"joint costs {share} % of the baseline's next-token loss; difference {difference} nats, "
        "paired over the windows"
    )


def mask_table(found: Prediction) -> Table:
    """Mask rows, a place in the block a row."""
    blocks = found.blocks
    assert blocks is not None
    rows = [
        [
            str(j + 1),
            blocks.accuracy[j].text(),
            blocks.agreement[j].text(),
            blocks.accepted[j].text(),
            f"{blocks.text[j].error:.3f}",
            f"{blocks.ar[j].error:.3f}",
            _sure(blocks.text[j].right_when_sure, blocks.text[j].sure[0], blocks.anchors),
        ]
        for j in range(len(blocks.accuracy))
    ]
    header = ["mask row", "right", "as ar", "all so far", "ECE", "ECE, ar", f"right at {SURE}+"]
    notes = [
        f"accepted length on natural text: {blocks.accepted_length.text()} tokens per forward, "
        f"over {blocks.anchors} anchors",
        "right: what the text has; as ar: what the clean row says; all so far: the clean row and "
        "all mask rows up to here are right",
        "ECE: expected calibration error of the confidence, against the text and against ar; "
        f"right at {SURE}+: share right of those so confident, and how many they are",
    ]
    return Table(f"Mask rows of {found.model}", header, rows, notes)


def _sure(share: float | None, rows: int, total: int) -> str:
    return "-" if share is None else f"{share:.3f} of {rows / total:.0%}"


def completion_tables(results: Sequence[ModeResult], tokens: int) -> list[Table]:
    """For every temperature, a setting a row: prompts that do not loop beside all."""
    found = []
    for temperature in dict.fromkeys(result.temperature for result in results):
        part = [result for result in results if result.temperature == temperature]
        how = "greedy" if not temperature else f"temperature {temperature:g}"
        every = part[0].every
        header = [
            "mode",
            "calm: tok/forward",
            "tok/s",
            "perplexity / ar",
            "all: tok/forward",
            "tok/s",
            "perplexity / ar",
            "as ar",
            "looping",
            "unverified",
        ]
        rows = [_completion_row(result) for result in part]
        notes = [
            f"calm: the {part[0].calm.prompts if part[0].calm else 0} of {every.prompts} prompts "
            f"whose text under ar does not loop; a text loops when its last {LOOP_TOKENS} tokens "
            f"repeat with a period of at most {LOOP_PERIOD}",
            "tok/forward is the accepted length; perplexity / ar: of the texts under the ar model, "
            f"against ar's own; as ar: identical texts; {INTERVAL}",
        ]
        found.append(Table(f"Completions of {tokens} tokens, {how}", header, rows, notes))
    return found


def _completion_row(result: ModeResult) -> list[str]:
    every, calm = result.every, result.calm
    return [
        setting_name(every.row.setting),
        *_speed(calm),
        *_speed(every),
        f"{every.identical}/{every.prompts}",
        f"{every.looping}/{every.prompts}",
        f"{every.unverified:.1%}",
    ]


def _speed(group: Group | None) -> list[str]:
    if group is None:
        return ["-", "-", "-"]
    against: Estimate | None = group.against_ar
    return [
        group.tokens_per_forward.text(2),
        f"{group.row.tokens_per_second:.1f} ({group.speed:.2f}x)",
        against.text() if against else "-",
    ]


def setting_name(setting: Setting) -> str:
    """`speculative 8`, with the layout where one is asked for."""
    size = f" {setting.block_size}" if setting.block_size else ""
    layout = setting.layout if "layout" in READ[setting.mode] and setting.layout != "auto" else ""
    return f"{setting.mode}{size} {layout}".rstrip()


def human_eval_table(found: Sequence[Solved]) -> Table:
    """HumanEval, a setting a row."""
    kinds = list(found[0].outcomes)
    rows = [
        [
            setting_name(one.row.setting),
            one.pass_at_1.text(),
            *(str(one.outcomes[kind]) for kind in kinds),
            f"{one.row.tokens_per_forward:.2f}",
            f"{one.row.tokens_per_second:.1f}",
        ]
        for one in found
    ]
    networks = " and ".join(sorted({one.network for one in found}))
    notes = [
        f"{sum(found[0].outcomes.values())} problems, one completion each; in brackets: "
        f"{LEVEL:.0%} Wilson intervals",
        f"the programs ran with the network {networks}",
    ]
    header = ["mode", "pass@1", *kinds, "tokens/forward", "tok/s"]
    return Table("HumanEval", header, rows, notes)
