"""What an artifact says about itself: `manifest.json`, and the same text inside `model.so`."""

import json
import typing
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from pathlib import Path
from types import UnionType
from typing import Any

from bitmtp_tvm.errors import BitMTPError

FORMAT_VERSION = 3
MARKER = b"BITMTP_MANIFEST\0"


@dataclass(frozen=True)
class KVLayout:
    """The KV storage: one tensor for the keys and one for the values of every layer."""

    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes that the device sets aside to run the artifact, as `allocated` counts them.

    `total` is the sum of the others. The driver's own context comes on top.
    """

    parameters: int
    kv: int
    workspace: int
    total: int

    @classmethod
    def of(cls, parameters: int, kv: int, workspace: int) -> "MemoryPlan":
        return cls(parameters, kv, workspace, parameters + kv + workspace)


# cudaMalloc hands out pages of 2 MiB; only allocations below half of one share a page.
CUDA_PAGE = 2 << 20


def allocated(sizes: Iterable[int], kind: str) -> int:
    """Bytes that separate allocations of `sizes` bytes take from the memory of a target kind."""
    if kind != "cuda":
        return sum(sizes)
    sizes = list(sizes)
    small = sum(size for size in sizes if size < CUDA_PAGE // 2)
    large = [size for size in sizes if size >= CUDA_PAGE // 2]
    return sum(-(-size // CUDA_PAGE) * CUDA_PAGE for size in [*large, small])


@dataclass(frozen=True)
class Shard:
    """One file of packed parameters."""

    file: str
    bytes: int
    sha256: str


@dataclass(frozen=True)
class TokenizerInfo:
    """What text needs besides tokenizer.json; `file` is None where there is no tokenizer.

    `chat_template` is the file of the Jinja template, None where there is none; `special_tokens`
    are the texts that it may call by name ("bos_token" and so on).
    """

    file: str | None
    add_bos: bool
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    mask_token_id: int | None
    chat_template: str | None = None
    special_tokens: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class KernelRecord:
    """One kernel and where its schedule comes from ("measured", "transferred" or "rule").

    `width` is 0 where the kernel serves every width.
    """

    name: str
    op: str
    format: str
    width: int
    provenance: str


@dataclass(frozen=True)
class Manifest:
    """Everything that a loader compares before it allocates anything.

    `config` is the model's (MTP included), `format` the low-bit format and `layout_version` that of
    the packed parameters. `versions` and `least_drivers` are those of the build report; `arch` is
    "" and `least_drivers` empty for a cpu. `chunks` are the steps
    that one call can run. `slots` is the number of KV rows, `counts` the number of
    kernels by provenance. Byte counts are exact.
    """

    model: str
    config: dict[str, Any]
    format: str
    layout_version: int
    target: str
    kind: str
    arch: str
    host_triple: str
    host_features: tuple[str, ...]
    versions: dict[str, str]
    least_drivers: dict[str, int]
    widths: tuple[int, ...]
    chunks: tuple[int, ...]
    prefill: tuple[int, ...]
    context: int
    slots: int
    kv: KVLayout
    memory: MemoryPlan
    shards: tuple[Shard, ...]
    tokenizer: TokenizerInfo
    kernels: tuple[KernelRecord, ...]
    counts: dict[str, int]
    format_version: int = FORMAT_VERSION

    def to_json(self) -> str:
        """The text of `manifest.json`: equal manifests give equal text."""
        return json.dumps(asdict(self), indent=1, sort_keys=True) + "\n"

    @classmethod
    def from_json(cls, text: str) -> "Manifest":
        """Read what `to_json` wrote.

        Raises `ValueError` for anything else: no JSON, another format version, and a missing,
        unknown or mistyped field, which it names.
        """
        data = json.loads(text)
        if not isinstance(data, dict):
            raise ValueError("not a JSON object")
        version = data.get("format_version")
        if version != FORMAT_VERSION:
            raise ValueError(f"format version {version} instead of {FORMAT_VERSION}")
        manifest: Manifest = decode(cls, data, "manifest")
        return manifest


def decode(kind: Any, value: Any, where: str) -> Any:
    """Rebuild a value of the type `kind` from parsed JSON; `ValueError` names a field that does not
    fit, `where` what is being read."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if is_dataclass(kind):
        return _decode_fields(kind, value, where)
    if origin in (UnionType, typing.Union):
        if value is None and type(None) in arguments:
            return None
        return decode(arguments[0], value, where)
    if origin is tuple:
        _expect(isinstance(value, list), where)
        return tuple(decode(arguments[0], item, f"{where}[{i}]") for i, item in enumerate(value))
    if origin is dict:
        _expect(isinstance(value, dict), where)
        return {key: decode(arguments[1], item, f"{where}.{key}") for key, item in value.items()}
    # bool is an int to isinstance, and never what is meant.
    _expect(kind is Any or type(value) is kind, where)
    return value


def _decode_fields(kind: Any, value: Any, where: str) -> Any:
    _expect(isinstance(value, dict), where)
    names = {field.name for field in fields(kind)}
    if set(value) != names:
        odd = sorted(set(value) ^ names)
        raise ValueError(f"missing or unknown field {where}.{odd[0]}")
    hints = typing.get_type_hints(kind)
    return kind(**{n: decode(hints[n], value[n], f"{where}.{n}") for n in sorted(names)})


def _expect(condition: bool, where: str) -> None:
    if not condition:
        raise ValueError(f"wrong type of {where}")


def embedded_manifest(path: Path) -> str:
    """The manifest text inside a library, read without loading it, whatever machine it is for.

    Raises `BitMTPError` when there is none, or more than one.
    """
    try:
        contents = path.read_bytes()
    except OSError as fault:
        raise BitMTPError(f"{path} cannot be read: {fault.strerror}") from fault
    start = contents.find(MARKER) + len(MARKER)
    end = contents.find(b"\0", start)
    if start < len(MARKER) or end < 0:
        raise BitMTPError(f"{path} holds no manifest: it is cut short, or not of bitmtp_tvm")
    if contents.find(MARKER, end) >= 0:
        raise BitMTPError(f"{path} holds more than one manifest: compile it again")
    try:
        return contents[start:end].decode()
    except UnicodeDecodeError as fault:
        raise BitMTPError(f"the manifest inside {path} is damaged: compile it again") from fault
