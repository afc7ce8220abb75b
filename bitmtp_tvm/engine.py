"""An artifact that is ready to answer: text in, pieces of text out."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bitmtp_tvm.chat import ChatTemplate, Message, read_template
from bitmtp_tvm.decoder import Decoder, check_prompt
from bitmtp_tvm.errors import UsageError
from bitmtp_tvm.flight import TokenSession
from bitmtp_tvm.generation import Generation
from bitmtp_tvm.modes import resolve
from bitmtp_tvm.sampling import SamplingOptions
from bitmtp_tvm.step_times import StepTimes, predict, read_step_times
from bitmtp_tvm.stopping import StopCondition, check_stop_strings
from bitmtp_tvm.text import TextCodec

# Called with the phase in words, the amount done and the total, in bytes.
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Parts:
    """What an engine is made of.

    `codec` is None for an artifact without a tokenizer, `chat` for one without a chat template,
    `mtp` for a model without multi-token prediction.
    """

    session: TokenSession
    codec: TextCodec | None
    eos_token_ids: frozenset[int]
    step_times: StepTimes
    mtp: Mapping[str, Any] | None = None
    chat: ChatTemplate | None = None


def open_parts(directory: Path, progress: Progress | None, graph: bool) -> Parts:
    """Check the artifact in `directory` and load it; raises `BitMTPError` with the reason."""
    # Here and not above: these load TVM, and an engine's class can be looked at without it.
    from bitmtp_tvm.artifact import check_device, open_artifact
    from bitmtp_tvm.session import Session

    artifact = open_artifact(directory)
    check_device(artifact)
    manifest, path = artifact.manifest, artifact.tokenizer
    info, vocab_size = manifest.tokenizer, manifest.config["vocab_size"]
    # Before the parameters, which take longer to load than a bad file takes to be found.
    codec = TextCodec(path, info.add_bos, info.bos_token_id, vocab_size) if path else None
    template = artifact.chat_template
    chat = read_template(template, info.special_tokens) if template else None
    step_times = read_step_times(directory, manifest) or predict(manifest)
    session = Session(artifact, progress, graph=graph)
    end_ids = frozenset(info.eos_token_ids)
    return Parts(session, codec, end_ids, step_times, manifest.config.get("mtp"), chat)


class Engine:
    """A loaded artifact: `for piece in Engine("dist/…").generate("…"): print(piece, end="")`.

    One generation at a time. What a prompt shares with the sequence before it is not computed
    again. Loading checks the artifact first and raises `BitMTPError` when it does not fit this
    machine; `progress` is called while it loads. `graph`: replay captured CUDA graphs, where the
    device has them. `step_times`: what a step costs in each bucket.
    """

    def __init__(
        self, directory: str | Path, progress: Progress | None = None, graph: bool = True
    ) -> None:
        parts = open_parts(Path(directory), progress, graph)
        self.step_times = parts.step_times
        self._session = parts.session
        self._codec = parts.codec
        self._chat = parts.chat
        self._mtp = parts.mtp
        self._eos_token_ids = parts.eos_token_ids
        self._decoder = Decoder(parts.session, parts.step_times)

    @property
    def session(self) -> TokenSession:
        """What runs the steps. Whoever runs some calls `reset` before and afterwards."""
        return self._session

    def encode(self, prompt: str | Sequence[int]) -> list[int]:
        """The ids of a prompt: text with the start token, or ids as they are.

        Raises `UsageError` when the prompt cannot be served (empty, too long, unknown ids, text
        for an artifact without a tokenizer).
        """
        ids = self._text_codec().encode(prompt) if isinstance(prompt, str) else prompt
        return check_prompt(ids, self._session.vocab_size, self._session.context)

    def encode_chat(self, messages: str | Sequence[Message]) -> list[int]:
        """The ids of a conversation that the assistant answers next; a text is one user message.

        A message is {"role": "system" | "user" | "assistant", "content": text}. The artifact's chat
        template writes them out, start token included. Raises `UsageError` as `encode` does, and
        without a template.
        """
        codec = self._text_codec()
        if self._chat is None:
            raise UsageError(
                "this artifact has no chat template, for its checkpoint had none: give the prompt "
                "as plain text, without --chat"
            )
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        ids = codec.encode_rendered(self._chat.render(messages))
        return check_prompt(ids, self._session.vocab_size, self._session.context)

    def generate(
        self,
        prompt: str | Sequence[int],
        max_new_tokens: int = 128,
        *,
        mode: str | None = None,
        block_size: int | None = None,
        threshold: float | None = None,
        draft_threshold: float | None = None,
        min_chain: int | None = None,
        layout: str = "auto",
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        seed: int | None = None,
        repetition_penalty: float = 1.0,
        stop: str | Sequence[str] = (),
    ) -> Generation:
        """Start a generation after `prompt` (text, or token ids taken as they are).

        `mode` … `layout`: see `bitmtp_tvm.modes.DecodeOptions`; None takes the default.
        `temperature` … `repetition_penalty`: see `bitmtp_tvm.sampling.SamplingOptions`; temperature
        0 is greedy. `stop`: texts that end the generation and are not part of its text. Raises
        `UsageError` as `encode` does, and for options that cannot be served. The work is done as
        the `Generation` is read.
        """
        ids = self.encode(prompt)
        condition = StopCondition(self._eos_token_ids, max_new_tokens, self._session.context)
        options = resolve(
            self._mtp,
            self._session.widths,
            mode=mode,
            block_size=block_size,
            threshold=threshold,
            draft_threshold=draft_threshold,
            min_chain=min_chain,
            layout=layout,
        )
        sampling = SamplingOptions(
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            seed=seed,
            repetition_penalty=repetition_penalty,
        )
        stop_strings = check_stop_strings(stop)
        if stop_strings and self._codec is None:
            raise UsageError("this artifact has no tokenizer: stop strings need text to look in")
        stream = self._decoder.generate(ids, condition, options, sampling)
        return Generation(stream, self._codec, self._eos_token_ids, stop_strings)

    def chat(
        self, messages: str | Sequence[Message], max_new_tokens: int = 128, **options: Any
    ) -> Generation:
        """Start a generation of the answer to `messages`; see `encode_chat`, and `generate` for the
        options."""
        return self.generate(self.encode_chat(messages), max_new_tokens, **options)

    def reset(self) -> None:
        """Forget the sequence, so that the next prompt is computed whole; ends a generation."""
        self._decoder.rewind(0)

    def _text_codec(self) -> TextCodec:
        if self._codec is None:
            raise UsageError(
                "this artifact has no tokenizer: give token ids (--prompt-ids 1,2,3) instead of "
                "text"
            )
        return self._codec
