"""The special token ids of a Hugging Face directory, and what its tokenizer adds to a text."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from tokenizers import Tokenizer

from bitmtp_tvm.checkpoint.jsonfile import read_optional_json
from bitmtp_tvm.errors import BitMTPError

T = TypeVar("T")


@dataclass(frozen=True)
class TokenIds:
    """See the fields of the same names in `Checkpoint`."""

    tokenizer: Path | None
    add_bos: bool
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    chat_template: str | None = None
    special_tokens: Mapping[str, str] = field(default_factory=dict)


def read_token_ids(
    directory: Path, config: dict[str, Any], vocab_size: int, begins_with_bos: bool
) -> TokenIds:
    """Ids from config.json (`config`), generation_config.json and the two tokenizer files.

    `begins_with_bos`: whether a prompt begins with the bos of config.json where no tokenizer file
    speaks of it. A Qwen3 names one and was trained without.

    End tokens are the union of all: chat checkpoints name theirs in only one of the files. Raises
    BitMTPError for an id outside the `vocab_size` rows and for a tokenizer that does not load.
    """
    sources = {
        directory / "config.json": config,
        directory / "generation_config.json": read_optional_json(
            directory / "generation_config.json"
        ),
    }
    eos: list[int] = []
    bos: int | None = None
    for path, values in sources.items():
        eos += _ids(path, values, "eos_token_id", vocab_size)
        found = _ids(path, values, "bos_token_id", vocab_size)
        bos = found[0] if bos is None and found else bos
    path = directory / "tokenizer.json"
    if not path.exists():
        return TokenIds(None, False, bos, tuple(dict.fromkeys(eos)))
    tokenizer = guarded(path, lambda: Tokenizer.from_file(str(path)))
    _check_vocabulary(path, tokenizer, vocab_size)
    options_path = directory / "tokenizer_config.json"
    options = read_optional_json(options_path)
    eos += _named_end(options_path, options, tokenizer)
    silent = begins_with_bos and not options_path.exists()
    add_bos = _adds_bos(path, tokenizer, None if silent else options, bos)
    template = _chat_template(directory, options_path, options)
    special = _special_tokens(directory, options)
    if bos is not None and (word := tokenizer.id_to_token(bos)) is not None:
        special.setdefault("bos_token", word)
    return TokenIds(path, add_bos, bos, tuple(dict.fromkeys(eos)), template, special)


def _ids(path: Path, values: dict[str, Any], key: str, vocab_size: int) -> list[int]:
    value = values.get(key)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    for token in ids:
        if type(token) is not int or not 0 <= token < vocab_size:
            raise BitMTPError(
                f"{path}: {key} is {token!r}, outside the {vocab_size} rows of the vocabulary"
            )
    return ids


def guarded(path: Path, work: Callable[[], T]) -> T:
    """What `work` gives; a fault of the tokenizers library becomes a BitMTPError about `path`."""
    try:
        return work()
    except (KeyboardInterrupt, SystemExit):
        raise
    # The library raises plain Exception, or for some damaged files a panic that is not even that.
    except BaseException as fault:
        raise BitMTPError(f"{path} is not a readable tokenizer: {fault}") from fault


def _check_vocabulary(path: Path, tokenizer: Tokenizer, vocab_size: int) -> None:
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    token = max(vocabulary, key=vocabulary.__getitem__, default=None)
    if token is None:
        raise BitMTPError(f"{path} has an empty vocabulary")
    if vocabulary[token] >= vocab_size:
        raise BitMTPError(
            f"{path}: token {token!r} has id {vocabulary[token]}, outside the {vocab_size} rows of "
            "the vocabulary"
        )


def _named_end(path: Path, options: dict[str, Any], tokenizer: Tokenizer) -> list[int]:
    """The id of `eos_token` in tokenizer_config.json: the end of a turn in chat checkpoints."""
    token = options.get("eos_token")
    if isinstance(token, dict):
        token = token.get("content")
    if token is None:
        return []
    found = tokenizer.token_to_id(token) if isinstance(token, str) else None
    if found is None:
        raise BitMTPError(f"{path}: eos_token {token!r} is not in tokenizer.json")
    return [found]


def _adds_bos(
    path: Path, tokenizer: Tokenizer, options: dict[str, Any] | None, bos: int | None
) -> bool:
    """Whether a prompt begins with the bos: `add_bos_token`, else the post-processor.

    With neither tokenizer_config.json (`options` None) nor post-processor nothing speaks against
    it, and a BitNet that names a bos was trained with it.
    """
    added = guarded(path, lambda: tokenizer.encode("", add_special_tokens=True).ids)
    if added and added != [bos]:
        raise BitMTPError(
            f"{path}: its post-processor adds the ids {added} to a text; only the bos, {bos}, is "
            "supported"
        )
    if options is None:
        return bos is not None
    wanted = options.get("add_bos_token")
    if wanted is None:
        return bool(added)
    if wanted and bos is None:
        raise BitMTPError(
            f"{path.parent} sets add_bos_token in tokenizer_config.json, but names no bos_token_id"
        )
    return bool(wanted)


def _chat_template(directory: Path, path: Path, options: dict[str, Any]) -> str | None:
    """The template of chat_template.jinja, else of tokenizer_config.json (`options` at `path`).

    Of several named ones the one called "default".
    """
    jinja = directory / "chat_template.jinja"
    if jinja.exists():
        try:
            return jinja.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as fault:
            raise BitMTPError(f"{jinja} cannot be read: {fault}") from fault
    template = options.get("chat_template")
    if isinstance(template, list):
        named = [entry for entry in template if isinstance(entry, dict)]
        template = next((e.get("template") for e in named if e.get("name") == "default"), None)
    if template is not None and not isinstance(template, str):
        raise BitMTPError(f"{path}: chat_template is {template!r}, which is no text")
    return template


def _special_tokens(directory: Path, options: dict[str, Any]) -> dict[str, str]:
    """The texts of "bos_token", "eos_token" and so on, as chat templates call them."""
    stored = read_optional_json(directory / "special_tokens_map.json") | options
    texts = {
        name: token.get("content") if isinstance(token, dict) else token
        for name, token in stored.items()
        if name.endswith("_token") and not name.startswith("add_")
    }
    return {name: text for name, text in texts.items() if isinstance(text, str)}
