"""Where a tokenizer comes from: files and objects of four libraries, recognized by name."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from layerzero._util.files import read_given
from layerzero.spec.errors import BackendNotAvailableError, ConfigurationError
from layerzero.spec.reasons import Reason
from layerzero.tokenization.codecs import Codec, HuggingFaceCodec, SentencePieceCodec, TiktokenCodec, mistral
from layerzero.tokenization.templates import ChatTemplate, MistralTemplate, Template

_MAX_FILE = 256 << 20
_MAX_BESIDE = 16 << 20  # of the files beside it: a configuration, a chat template
Opened = tuple[Codec, Template | None]

# What is asked for by name, and what brings it.
_EXTRAS = {"mistral_common": "mistral"}


def library(name: str) -> Any:
    """An optional library.

    Raises: BackendNotAvailableError: it is not installed; the message names the extra.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        extra = _EXTRAS.get(name, "tokenizers")
        raise BackendNotAvailableError(
            f"this tokenizer needs the library {name}: pip install 'layerzero-runtime[{extra}]'",
            backend=name,
            reason=Reason.BACKEND_MISSING,
        ) from error


def open_object(source: Any) -> Opened:
    """The codec of an object of a library, which is copied as far as it can change.

    Raises: TypeError: it is of no library that is known here. ConfigurationError: it cannot be copied.
    """
    backend = getattr(source, "backend_tokenizer", source)  # of transformers: one of `tokenizers`
    home = type(backend).__module__.partition(".")[0]
    try:
        if home == "tokenizers":
            specials = getattr(source, "special_tokens_map", {})
            return _copied(backend.to_str()), _template(getattr(source, "chat_template", None), specials)
        if home == "tiktoken":
            return TiktokenCodec(source), None
        if home == "sentencepiece":
            bos, eos = (bool(getattr(source, name, False)) for name in ("_add_bos", "_add_eos"))
            return SentencePieceCodec(source, library("sentencepiece"), bos, eos), None
        if home == "mistral_common":
            return _mistral(source)
    except (AttributeError, ValueError, RuntimeError) as error:
        raise ConfigurationError(f"source needs a usable tokenizer of {home}: {error}") from error
    raise TypeError(
        "source needs a path to a tokenizer's file or an object of tokenizers, transformers, tiktoken, "
        f"sentencepiece or mistral-common, got {type(source).__name__}"
    )


def find_file(path: Path) -> Path:
    """The tokenizer's file that `path` is or, as a folder, holds; the first in the order of `READERS`."""
    if not path.is_dir():
        return path
    files = (file for pattern in READERS for file in sorted(path.glob(pattern)))
    return next(files, path / next(iter(READERS)))


def open_file(path: Path) -> Opened:
    """The codec of a file, and the chat template beside it.

    Raises: ConfigurationError: the file cannot be read as a tokenizer. BackendNotAvailableError.
    """
    read = next((read for pattern, read in READERS.items() if fnmatch(path.name, pattern)), None)
    if read is None and path.suffix in (".json", ".model"):
        read = _READERS_OF_SUFFIXES[path.suffix]
    if read is None:
        raise ConfigurationError(f"source needs a file like {', '.join(READERS)}, got {path}")
    module, open_it = read
    library(module)
    data = _read(path, _MAX_FILE)
    try:
        return open_it(path, data)
    except ConfigurationError:
        raise
    except Exception as error:  # each library has its own for what it cannot parse, also bare Exception
        message = f"source needs a tokenizer's {path.suffix[1:]} file, {path}: {error}"
        raise ConfigurationError(message) from error


def _hugging_face(path: Path, data: bytes) -> Opened:
    return _copied(data.decode()), load_template(path.parent)


def _copied(text: str) -> Codec:
    try:
        return HuggingFaceCodec(library("tokenizers").Tokenizer.from_str(text))
    except Exception as error:  # the library raises bare Exception for whatever it cannot parse
        raise ConfigurationError(f"source needs a tokenizer's JSON: {error}") from error


def _sentencepiece(path: Path, data: bytes) -> Opened:
    config = _config(path.parent)
    module = library("sentencepiece")
    bos, eos = (bool(config.get(name, False)) for name in ("add_bos_token", "add_eos_token"))
    codec = SentencePieceCodec(module.SentencePieceProcessor(model_proto=data), module, bos, eos)
    return codec, load_template(path.parent)


def _mistral_file(path: Path, data: bytes) -> Opened:
    home = library("mistral_common.tokens.tokenizers.mistral")
    return _mistral(home.MistralTokenizer.from_file(str(path)))


def _mistral(source: Any) -> Opened:
    codec = mistral(source, library)
    if not hasattr(source, "encode_chat_completion"):
        return codec, None
    request = library("mistral_common.protocol.instruct.request").ChatCompletionRequest
    return codec, MistralTemplate(source, request)


READERS: Mapping[str, tuple[str, Callable[[Path, bytes], Opened]]] = {
    "tokenizer.json": ("tokenizers", _hugging_face),
    "tekken*.json": ("mistral_common", _mistral_file),
    "*.model.v*": ("mistral_common", _mistral_file),
    "tokenizer.model": ("sentencepiece", _sentencepiece),
}
_READERS_OF_SUFFIXES = {".json": READERS["tokenizer.json"], ".model": READERS["tokenizer.model"]}


# -- chat templates of a folder --------------------------------------------------------------------------


def load_template(folder: Path) -> ChatTemplate | None:
    """The chat template of a Hugging Face folder, or None where it has none.

    Raises: ConfigurationError: a file cannot be read, or the template cannot be parsed.
    """
    config = _config(folder)
    source = config.get("chat_template")
    own_file = folder / "chat_template.jinja"
    if own_file.exists():
        source = _decoded(own_file, bytes.decode)
    return _template(source, config)


def _template(source: Any, tokens: Mapping[str, Any]) -> ChatTemplate | None:
    if isinstance(source, list):  # several by name
        source = {entry["name"]: entry["template"] for entry in source}
    if isinstance(source, dict):
        source = source.get("default")
    if source is None:
        return None
    special = {}
    for name in ("bos_token", "eos_token", "unk_token", "pad_token"):
        value = tokens.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if text is not None:
            special[name] = str(text)
    return ChatTemplate(source, special)


def _config(folder: Path) -> dict[str, Any]:
    path = folder / "tokenizer_config.json"
    config = _decoded(path, json.loads) if path.exists() else {}
    if not isinstance(config, dict):
        raise ConfigurationError(f"source needs an object in tokenizer_config.json, got {path}")
    return config


def _decoded(path: Path, decode: Callable[[bytes], Any]) -> Any:
    """What is in a file beside a tokenizer's."""
    data = _read(path, _MAX_BESIDE)
    try:
        return decode(data)
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"source needs a readable {path.name}, got {path}: {error}") from error


def _read(path: Path, limit: int) -> bytes:
    try:
        return read_given(path, limit)
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"source needs a readable {path.name}, got {path}: {error}") from error
