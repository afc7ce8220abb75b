"""A checkpoint in a Hugging Face directory: its rows by PyTorch, and what its tokens mean."""

from pathlib import Path

from bitmtp_tvm.checkpoint.jsonfile import read_json
from bitmtp_tvm.checkpoint.token_ids import read_token_ids
from bitmtp_tvm.errors import UsageError
from bitmtp_tvm.evaluation.held_out import Vocabulary
from bitmtp_tvm.evaluation.torch_rows import TorchRows, open_torch
from bitmtp_tvm.text import TextCodec


def open_checkpoint_rows(
    directory: Path,
    device: str,
    quant: str | None = None,
    quant_threshold: float | None = None,
) -> tuple[TorchRows, Vocabulary]:
    """The model on `device` and its vocabulary; `quant`, `quant_threshold`: as compile takes them.

    Raises as `open_torch` does, and for token files that are damaged.
    """
    if not (directory / "config.json").is_file():
        raise UsageError(f"{directory} is no checkpoint: config.json is missing")
    raw = read_json(directory / "config.json")
    rows = open_torch(directory, device, quant, quant_threshold)
    # A BitNet that names a bos was trained with it, a Qwen3 was not.
    begins = raw.get("model_type") == "bitnet"
    ids = read_token_ids(directory, raw, rows.vocab_size, begins)
    codec = (
        TextCodec(ids.tokenizer, ids.add_bos, ids.bos_token_id, rows.vocab_size)
        if ids.tokenizer
        else None
    )
    bos = ids.bos_token_id if ids.add_bos else None
    return rows, Vocabulary(rows.vocab_size, codec, bos, ids.eos_token_ids)
