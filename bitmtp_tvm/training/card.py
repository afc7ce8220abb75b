"""The model card: what went in and what was measured, and nothing that was not."""

from pathlib import Path

from bitmtp_tvm.training.measures import Measures
from bitmtp_tvm.training.options import TrainOptions
from bitmtp_tvm.training.schedule import Budget
from relax_models.config import ModelConfig

# Options that say something about the model, by the part of the card they stand in.
_RECIPE = (
    "optimizer",
    "lr",
    "schedule",
    "warmup",
    "decay",
    "weight_decay",
    "clip",
    "ema",
    "batch_tokens",
    "length",
    "seed",
    "dtype",
)
_OBJECTIVE = ("blocks", "mtp_weight", "mtp_decay", "kl_share", "train_only")


def write_card(
    path: Path,
    options: TrainOptions,
    config: ModelConfig,
    parameters: int,
    budget: Budget,
    measures: Measures | None,
    device: str,
) -> None:
    """Write README.md: shape, data, objective, recipe, and the numbers of the run."""
    lines = [f"# {path.parent.resolve().name}", "", *_shape(config, parameters), ""]
    lines += ["## Data", "", f"- Training: {', '.join(options.data)}"]
    held = ", ".join(options.validation_data) or "held out of the same data"
    lines += [f"- Validation: {held}", "", "## Recipe", ""]
    start = options.model or f"random weights, seed {options.seed}"
    lines += [f"- Start: {start}", *_objective(options, config)]
    lines += [f"- {name}: {getattr(options, name)}" for name in _RECIPE]
    lines += ["", "## Measured in this run", ""]
    lines += [f"- {budget.tokens} tokens in {budget.seconds / 60:.1f} minutes on {device}"]
    if budget.seconds:
        lines += [f"- {budget.tokens / budget.seconds:.0f} clean tokens a second"]
    lines += _numbers(measures)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _shape(config: ModelConfig, parameters: int) -> list[str]:
    how = f", {config.quantization}" if config.quantization else ""
    return [
        f"A {config.architecture} of {parameters / 1e6:.1f} million parameters "
        f"({config.weight_format}{how}): hidden size {config.hidden_size}, "
        f"{config.num_hidden_layers} layers, {config.num_attention_heads} heads and "
        f"{config.num_key_value_heads} KV heads of {config.head_dim}, feed-forward "
        f"{config.intermediate_size}, context {config.max_position_embeddings}, vocabulary "
        f"{config.vocab_size}."
    ]


def _objective(options: TrainOptions, config: ModelConfig) -> list[str]:
    if config.mtp is None:
        return ["- Objective: next token alone"]
    mtp = config.mtp
    return [
        f"- Objective: next token and {mtp.block_size} mask rows, {mtp.block_attention} blocks, "
        f"mask token {mtp.mask_token_id}; the label of a mask row is the token after it",
        *(f"- {name}: {getattr(options, name)}" for name in _OBJECTIVE),
    ]


def _numbers(measures: Measures | None) -> list[str]:
    if measures is None:
        return ["- no validation data"]
    lines = [f"- validation loss of the next token: {measures.ntp_loss:.4f} nats"]
    if measures.accuracy:
        shown = " ".join(f"{value:.3f}" for value in measures.accuracy)
        same = " ".join(f"{value:.3f}" for value in measures.agreement)
        lines += [
            f"- mask rows that name the true token, by position: {shown}",
            f"- mask rows that agree with the model's own choice, by position: {same}",
            f"- accepted length on natural text: {measures.accepted_length:.3f} tokens a forward",
        ]
    return lines
