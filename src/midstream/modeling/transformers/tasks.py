"""Which of transformers' auto classes loads a checkpoint: by its task, or by what it says it is."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

_FURTHER: Mapping[str, str] = MappingProxyType(
    {
        "image-to-text": "AutoModelForImageTextToText",
        "multiple-choice": "AutoModelForMultipleChoice",
        "question-answering": "AutoModelForQuestionAnswering",
        "summarization": "AutoModelForSeq2SeqLM",
        "text2text-generation": "AutoModelForSeq2SeqLM",
        "translation": "AutoModelForSeq2SeqLM",
        "visual-question-answering": "AutoModelForVisualQuestionAnswering",
    }
)
"""Tasks that transformers has classes for, and no pipeline."""

_FIRST: Mapping[str, str] = MappingProxyType(
    {
        "AutoModelForImageTextToText": "image-text-to-text",
        "AutoModelForCausalLM": "text-generation",
        "AutoModelForSpeechSeq2Seq": "automatic-speech-recognition",
        "AutoModelForSeq2SeqLM": "text2text-generation",
        "AutoModelForMultimodalLM": "any-to-any",
        "AutoModelForSequenceClassification": "text-classification",
        "AutoModelForTokenClassification": "token-classification",
        "AutoModelForQuestionAnswering": "question-answering",
        "AutoModelForMaskedLM": "fill-mask",
        "AutoModelForCTC": "automatic-speech-recognition",
        "AutoModelForAudioClassification": "audio-classification",
        "AutoModelForImageClassification": "image-classification",
        "AutoModel": "feature-extraction",
    }
)
"""Auto classes in the order in which they are asked whether a class is theirs, with their task."""

_PASS = "Pass task=, for example task='text-generation'."


def auto_class(task: str | None, config: Any) -> Any:
    """The auto class that loads a checkpoint.

    Args:
        task: a task of `transformers.pipeline`, or None to go by the configuration.
        config: the checkpoint's configuration.

    Raises:
        ValueError: an unknown task, or none given and the configuration does not say.
    """
    import transformers

    if task is None:
        return getattr(transformers, infer(config)[0])
    classes = [getattr(transformers, name) for name in known_tasks()[check_task(task)]]
    return next((each for each in classes if _loads(each, config)), classes[0])


def check_task(task: str) -> str:
    """A task's own name, for an alias too.

    Raises:
        ValueError: no task has this name; the nearest are named.
    """
    from transformers.pipelines import TASK_ALIASES

    known = known_tasks()
    name = str(TASK_ALIASES.get(task, task))
    if name in known:
        return name
    near = difflib.get_close_matches(task, [*known, *TASK_ALIASES], n=3)
    hint = f"Did you mean {' or '.join(map(repr, near))}?" if near else "There are"
    names = "" if near else f" {', '.join(sorted(known))}."
    raise ValueError(f"task={task!r} is not a task of transformers. {hint}{names}")


@functools.cache
def known_tasks() -> Mapping[str, tuple[str, ...]]:
    """The auto classes of every task, by name."""
    from transformers.pipelines import SUPPORTED_TASKS

    found = {
        task: tuple(each.__name__ for each in entry["pt"])
        for task, entry in SUPPORTED_TASKS.items()
        if entry["pt"]
    }
    return {**found, **{task: (name,) for task, name in _FURTHER.items()}}


def infer(config: Any) -> tuple[str, str | None]:
    """(auto class, task) of a checkpoint by the architecture that its configuration names.

    The task is None for a class that no task uses, such as one for pre-training.

    Raises:
        ValueError: the configuration names no architecture, or one that no auto class has.
    """
    names = tuple(getattr(config, "architectures", None) or ())
    for architecture in names:
        found = _auto_of(architecture, config)
        if found is not None:
            return found, task_of(found)
    kind = getattr(config, "model_type", None) or type(config).__name__
    what = f"architectures {list(names)}" if names else "no architecture"
    raise ValueError(
        f"The configuration (model type {kind!r}) names {what}, which does not say what the model "
        f"is for. {_PASS}"
    )


def task_of_module(module: Any) -> str | None:
    """The task of a ready module, by its class or the nearest one that it derives from.

    Raises:
        ValueError: it is not a model of transformers, or of one that no auto class has.
    """
    for kind in type(module).__mro__:
        found = _auto_of(kind.__name__, getattr(module, "config", None))
        if found is not None:
            return task_of(found)
    name = type(module).__name__
    raise ValueError(f"{name} is no class that transformers has a task for. {_PASS}")


def task_of(auto: str) -> str | None:
    """The task that an auto class is for; None where there is none."""
    if auto in _FIRST:
        return _FIRST[auto]
    return next((task for task, names in known_tasks().items() if auto in names), None)


def _auto_of(architecture: str, config: Any) -> str | None:
    remote = getattr(config, "auto_map", None) or {}
    for name, auto in _autos().items():
        if architecture in _class_names(auto, config):
            return name
        if str(remote.get(name, "")).rpartition(".")[2] == architecture:
            return name
    return None


def _class_names(auto: Any, config: Any) -> list[str]:
    """The classes that an auto class has for a configuration."""
    found = auto._model_mapping.get(type(config), ()) if config is not None else ()
    return [each.__name__ for each in (found if isinstance(found, tuple | list) else (found,))]


def _loads(auto: Any, config: Any) -> bool:
    """Whether an auto class has the class that a configuration names, or any for its type."""
    names = _class_names(auto, config)
    wanted = getattr(config, "architectures", None) or names
    return any(name in names for name in wanted)


@functools.cache
def _autos() -> dict[str, Any]:
    """Every auto class of transformers, those of `_FIRST` first."""
    from transformers.models.auto import modeling_auto

    rest = sorted(name for name in vars(modeling_auto) if name.startswith("AutoModelFor"))
    return {name: getattr(modeling_auto, name) for name in dict.fromkeys([*_FIRST, *rest])}
