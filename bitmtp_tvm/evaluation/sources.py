"""What is evaluated: a checkpoint in PyTorch, a compiled artifact, and what their tokens mean."""

from pathlib import Path
from typing import cast

from bitmtp_tvm.artifact import open_artifact
from bitmtp_tvm.device_state import device_state
from bitmtp_tvm.engine import Engine
from bitmtp_tvm.errors import UsageError
from bitmtp_tvm.evaluation.artifact_rows import ArtifactRows, LogitSession
from bitmtp_tvm.evaluation.held_out import Vocabulary
from bitmtp_tvm.evaluation.rows import Masks, RowModel
from bitmtp_tvm.generate import progress_bar
from bitmtp_tvm.manifest import Manifest
from bitmtp_tvm.text import TextCodec


class CompiledModel:
    """A loaded artifact with what the evaluation needs of it.

    Raises `BitMTPError` when it does not fit this machine.
    """

    def __init__(self, directory: Path, graph: bool) -> None:
        artifact = open_artifact(directory)
        self.manifest: Manifest = artifact.manifest
        self.name = str(directory)
        info, size = self.manifest.tokenizer, int(self.manifest.config["vocab_size"])
        path = artifact.tokenizer
        codec = TextCodec(path, info.add_bos, info.bos_token_id, size) if path else None
        bos = info.bos_token_id if info.add_bos else None
        self.vocabulary = Vocabulary(size, codec, bos, info.eos_token_ids)
        with progress_bar() as progress:
            self.engine = Engine(directory, progress, graph)
        self.masks = masks_of(self.manifest)

    def rows(self) -> ArtifactRows:
        """Rows through the artifact's own decode buckets."""
        self.engine.reset()
        return ArtifactRows(cast(LogitSession, self.engine.session), self.masks, self.name)

    def about(self) -> dict[str, object]:
        """The program, the device and its state, for the record."""
        manifest = self.manifest
        return {
            "artifact": self.name,
            "compiled_model": manifest.model,
            "target": manifest.target,
            "versions": manifest.versions,
            "device_state": device_state(manifest.kind),
        }


def masks_of(manifest: Manifest) -> Masks | None:
    mtp = manifest.config.get("mtp")
    if mtp is None:
        return None
    bidirectional = mtp["block_attention"] == "bidirectional"
    return Masks(int(mtp["block_size"]), int(mtp["mask_token_id"]), bidirectional)


def check_same_tokens(one: RowModel, other: RowModel) -> None:
    """`UsageError` for models whose losses a token cannot be compared."""
    if one.vocab_size != other.vocab_size:
        raise UsageError(
            f"{one.name} has a vocabulary of {one.vocab_size} and {other.name} one of "
            f"{other.vocab_size}: only models with the same tokens can be compared"
        )
    tokenizers = [Path(model.name) / "tokenizer.json" for model in (one, other)]
    present = [path.read_bytes() for path in tokenizers if path.is_file()]
    if len(present) == 2 and present[0] != present[1]:
        raise UsageError(
            f"{tokenizers[0]} and {tokenizers[1]} differ: only models with the same tokens can be "
            "compared"
        )


def check_length(model: RowModel, length: int) -> None:
    """`UsageError` for windows that do not fit the context."""
    if length > model.context:
        raise UsageError(
            f"windows of {length} tokens do not fit the context of {model.name}, {model.context}: "
            "give a smaller --length"
        )
