"""What lies beside a checkpoint's weights: tokenizer, processors, generation settings."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

_PREPROCESSOR = ("preprocessor_config.json", "processor_config.json")
_FILES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "tokenizer": (
            "tokenizer_config.json",
            "tokenizer.json",
            "tokenizer.model",
            "vocab.json",
            "vocab.txt",
            "spiece.model",
            "sentencepiece.bpe.model",
            "source.spm",
            "tekken.json",
        ),
        "processor": _PREPROCESSOR,
        "image_processor": ("image_processor_config.json", *_PREPROCESSOR),
        "feature_extractor": ("feature_extractor_config.json", *_PREPROCESSOR),
        "generation_config": ("generation_config.json",),
    }
)
"""Files of which a checkpoint has at least one where it has the part."""

_CLASSES: Mapping[str, str] = MappingProxyType(
    {
        "tokenizer": "AutoTokenizer",
        "processor": "AutoProcessor",
        "image_processor": "AutoImageProcessor",
        "feature_extractor": "AutoFeatureExtractor",
        "generation_config": "GenerationConfig",
    }
)
_HUB = ("cache_dir", "force_download", "local_files_only", "proxies", "subfolder", "token")


class Parts:
    """What lies beside the weights of one checkpoint, each part loaded when it is first asked for.

    Attributes:
        repo_id: repository id or folder, or None for a module that was made here.
        revision: branch, tag or commit of the repository.
    """

    repo_id: str | None
    revision: str | None
    _arguments: dict[str, Any]
    _parts: dict[str, Any]

    @property
    def tokenizer(self) -> Any:
        """The tokenizer, or None."""
        return self._part("tokenizer")

    @property
    def processor(self) -> Any:
        """The processor of a model that takes more than text, or None."""
        return self._part("processor")

    @property
    def image_processor(self) -> Any:
        """The image processor, or None."""
        return self._part("image_processor")

    @property
    def feature_extractor(self) -> Any:
        """The feature extractor of an audio model, or None."""
        return self._part("feature_extractor")

    def _part(self, kind: str) -> Any:
        """A part, loaded once; a name that was given is where it comes from."""
        given = self._parts.get(kind)
        if kind not in self._parts or isinstance(given, str | os.PathLike):
            source = self.repo_id if given is None else os.fspath(given)
            arguments = {**self._arguments, "revision": self.revision if given is None else None}
            self._parts[kind] = part(kind, source, arguments) if source else None
        return self._parts[kind]


def given_parts(processor: Any, **given: Any) -> dict[str, Any]:
    """The parts that were given, by kind; a processor that was given brings its own."""
    found = {kind: each or getattr(processor, kind, None) for kind, each in given.items()}
    found["processor"] = processor
    return {kind: each for kind, each in found.items() if each is not None}


def part(kind: str, source: str, arguments: Mapping[str, Any]) -> Any:
    """A part of a checkpoint, or None where it has none.

    Args:
        kind: "tokenizer", "processor", "image_processor", "feature_extractor" or
            "generation_config".
        source: repository id or folder.
        arguments: keywords of `from_pretrained`; those that say where and which are used.

    Raises:
        Exception: transformers' own, for a part that is there and cannot be loaded.
    """
    import transformers

    hub = hub_arguments(arguments)
    files = _files(source, _FILES[kind], hub)
    if not files:
        return None
    if kind != "generation_config":
        hub["trust_remote_code"] = arguments.get("trust_remote_code")
    found = _loaded(getattr(transformers, _CLASSES[kind]), source, hub, kind, files)
    if kind == "tokenizer":
        _fill_padding(found)
    if kind == "processor" and not isinstance(found, transformers.ProcessorMixin):
        return None  # the auto class falls back on a tokenizer or an image processor alone
    return found


def hub_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The keywords of `from_pretrained` that say where a checkpoint is and which of it."""
    names = (*_HUB, "revision")
    return {name: arguments[name] for name in names if arguments.get(name) is not None}


def _files(source: str, names: Sequence[str], hub: Mapping[str, Any]) -> list[str]:
    """Paths of the files that a checkpoint has; of a repository they are downloaded."""
    from transformers.utils import cached_file

    if os.path.isdir(source):
        folder = os.path.join(source, hub.get("subfolder", ""))
        paths = (os.path.join(folder, name) for name in names)
        return [path for path in paths if os.path.isfile(path)]
    quiet = {
        "_raise_exceptions_for_gated_repo": False,
        "_raise_exceptions_for_missing_entries": False,
        "_raise_exceptions_for_connection_errors": False,
    }
    paths = (cached_file(source, name, **hub, **quiet) for name in dict.fromkeys(names))
    return [path for path in paths if path is not None]


def _loaded(auto: Any, source: str, hub: Mapping[str, Any], kind: str, files: Sequence[str]) -> Any:
    """A part that one of the files may speak of; None where none does."""
    try:
        return auto.from_pretrained(source, **hub)
    except (OSError, ValueError, KeyError):
        # one file serves images and audio: it says nothing about the other kind
        if kind in ("tokenizer", "generation_config"):
            raise
        return None
    except ImportError:  # a part without which other parts can be used
        if kind in ("image_processor", "feature_extractor") and not _names(kind, files):
            return None
        raise


def _names(kind: str, files: Sequence[str]) -> bool:
    """Whether one of the files names a class for a part."""
    for path in files:
        with open(path, encoding="utf-8") as file:
            found = json.load(file)
        if f"{kind}_type" in found or kind in found:
            return True
    return False


def _fill_padding(tokenizer: Any) -> None:
    """Pad with the end of a text where a tokenizer of our own has no padding token."""
    if getattr(tokenizer, "pad_token", "") is None and tokenizer.eos_token is not None:
        tokenizer.pad_token = tokenizer.eos_token
