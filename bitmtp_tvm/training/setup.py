"""From options to a model on its device: its shape, its weights, its mask token."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from bitmtp_tvm.checkpoint.jsonfile import read_json
from bitmtp_tvm.errors import BitMTPError, UsageError
from bitmtp_tvm.training.checkpoint import check_packable, load
from bitmtp_tvm.training.low_bit import check_exact
from bitmtp_tvm.training.model import TrainableDecoder
from bitmtp_tvm.training.options import TrainOptions
from bitmtp_tvm.training.parallel import World
from bitmtp_tvm.training.sources import Vocabulary, read_vocabulary
from relax_models.config import PRESETS, ModelConfig, MTPConfig
from relax_models.formats import FORMATS

_BLOCK_SIZE = 8
_MASK = "<|mask|>"
_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
_TOKENIZER = "tokenizer.json"


@dataclass(frozen=True)
class Source:
    """The vocabulary, where its files are, and the ids for config.json."""

    vocabulary: Vocabulary
    text_files: Path
    ids: Mapping[str, Any]


def find_source(options: TrainOptions) -> Source:
    """The tokenizer: what --tokenizer names, or that of the model, or one beside the data.

    Raises UsageError where there is none, or no model.
    """
    stored: Mapping[str, Any] = {}
    places = [] if options.tokenizer is None else [options.tokenizer]
    if options.model is not None:
        path = Path(options.model) / "config.json"
        if not path.is_file():
            raise UsageError(f"--model {options.model} is no checkpoint: it has no config.json")
        stored = read_json(path)
        places.append(Path(options.model) / _TOKENIZER)
    places += [Path(place) / _TOKENIZER for place in options.data]
    found = options.tokenizer or next((place for place in places if place.is_file()), None)
    if found is None:
        raise UsageError("give --tokenizer, a tokenizer.json: neither model nor data has one")
    ends = stored.get("eos_token_id")
    end = ends[0] if isinstance(ends, list) and ends else ends
    # A Qwen3 names a bos and was trained without.
    bos = stored.get("bos_token_id") if stored.get("model_type") != "qwen3" else None
    vocabulary = read_vocabulary(found, bos, end if isinstance(end, int) else None)
    ids = {name: stored[name] for name in _IDS if name in stored}
    if not ids:
        ids = {"bos_token_id": vocabulary.bos, "eos_token_id": vocabulary.eos}
    files = Path(options.model) if options.model is not None and not options.tokenizer else found
    return Source(vocabulary, files, ids)


def make_model(options: TrainOptions, source: Source, here: World) -> TrainableDecoder:
    """The model, its weights loaded or random, on the device, its config with the objective.

    Raises UsageError or BitMTPError for what does not fit together.
    """
    name = options.dtype or ("bfloat16" if here.device.type == "cuda" else "float32")
    dtype = getattr(torch, name)
    if options.model is not None:
        model = load(
            Path(options.model),
            quant=options.quant,
            quant_threshold=options.quant_threshold,
            dtype=dtype,
        )
    else:
        model = _from_scratch(options, source, dtype)
    model.config = replace(model.config, mtp=_objective(options, model.config, source))
    _check(options, model.config, source)
    if options.train_only == "masks":
        assert model.config.mtp is not None
        model.train_only_row(model.config.mtp.mask_token_id)
    model.checkpointing = options.activation_checkpointing
    return model.to(here.device)


def _from_scratch(options: TrainOptions, source: Source, dtype: torch.dtype) -> TrainableDecoder:
    if options.train_only != "all":
        raise UsageError(f"--train-only {options.train_only} needs --model: weights to keep")
    if options.preset is not None:
        config = PRESETS[options.preset]
    else:
        try:
            shape = {"vocab_size": source.vocabulary.size, **(options.config or {})}
            config = ModelConfig.from_dict(shape)
        except ValueError as fault:
            raise UsageError(f"--config: {fault}") from fault
    if config.architecture == "qwen3" and options.quant is None:
        raise UsageError("a Qwen3 needs --quant, the rule that makes its weights low-bit")
    if config.architecture != "qwen3" and options.quant is not None:
        raise UsageError("--quant is for a Qwen3: a BitNet has its own rule")
    if config.architecture != "qwen3" and options.quant_threshold is not None:
        raise UsageError("--quant-threshold is for a Qwen3: a BitNet has its own rule")
    model = _built(config, options, dtype)
    model.initialise(options.seed)
    return model


def _built(config: ModelConfig, options: TrainOptions, dtype: torch.dtype) -> TrainableDecoder:
    try:
        return TrainableDecoder(config, options.quant, options.quant_threshold, dtype)
    except ValueError as fault:
        raise UsageError(f"--quant: {fault}") from fault


def _objective(options: TrainOptions, config: ModelConfig, source: Source) -> MTPConfig | None:
    """What mask rows mean: the options, then what the model says, then the usual."""
    if options.ntp_only:
        return None
    before = config.mtp
    token = options.mask_token_id
    if token is None and before is not None:
        token = before.mask_token_id
    if token is None:
        token = source.vocabulary.named(_MASK)
    if token is None:
        raise UsageError(
            f"give --mask-token-id (the tokenizer has no {_MASK}), or --ntp-only for no mask rows"
        )
    size = options.block_size or (before.block_size if before else _BLOCK_SIZE)
    kind = options.block_attention or (before.block_attention if before else "causal")
    return MTPConfig(size, token, "next", kind)


def _check(options: TrainOptions, config: ModelConfig, source: Source) -> None:
    vocabulary = source.vocabulary
    if vocabulary.size > config.vocab_size:
        raise BitMTPError(
            f"{vocabulary.path} has {vocabulary.size} tokens and the model {config.vocab_size} "
            "rows: the tokenizer belongs to another model"
        )
    if config.mtp is not None:
        try:
            config.mtp.validate(config.vocab_size)
        except ValueError as fault:
            raise UsageError(str(fault)) from fault
        if options.length <= config.mtp.block_size:
            raise UsageError(f"--length {options.length} is no longer than a block of mask rows")
    if FORMATS[config.weight_format].group is None:
        try:
            check_exact(max(config.hidden_size, config.intermediate_size, config.query_width))
        except ValueError as fault:
            raise UsageError(str(fault)) from fault
    if options.packed:
        try:
            check_packable(config)
        except UsageError as fault:
            raise UsageError(f"--packed: {fault}") from fault
    if options.length > config.max_position_embeddings:
        raise UsageError(
            f"--length is {options.length}; the model serves {config.max_position_embeddings}"
        )
