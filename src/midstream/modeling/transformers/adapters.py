"""PEFT adapters: attached to a module, swapped and taken off again."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_NAME = "default"


def check_installed() -> None:
    """Check that adapters can be used.

    Raises:
        ImportError: PEFT is not installed.
    """
    if importlib.util.find_spec("peft") is None:
        raise ImportError("An adapter (peft=, load_adapter) needs PEFT: pip install peft.")


def wraps(module: torch.nn.Module) -> bool:
    """Whether a module is PEFT's own, around the model that it adapts."""
    peft = sys.modules.get("peft")
    return peft is not None and isinstance(module, peft.PeftModel)


def attach(module: Any, adapter: str) -> None:
    """Attach an adapter with its weights to a module that has none.

    The adapter's modules join the tree, and a layer that it adapts is found below the adapter's
    (``q_proj.base_layer``). Whether weights take gradients stays as it was; the adapter's do.

    Args:
        module: a loaded model of transformers.
        adapter: folder or repository id.
    """
    with _as_before(module):
        module.load_adapter(adapter, adapter_name=_NAME)


def attach_empty(module: Any, adapter: str) -> None:
    """Give a module on the meta device its tree with an adapter; no weights are read."""
    from peft import PeftConfig, inject_adapter_in_model

    with _as_before(module):
        inject_adapter_in_model(
            PeftConfig.from_pretrained(adapter), module, _NAME, low_cpu_mem_usage=True
        )


def detach(module: torch.nn.Module) -> None:
    """Take adapters off: the modules they were put around are back at their paths, unchanged."""
    if importlib.util.find_spec("peft") is None:
        return
    if getattr(module, "_hf_peft_config_loaded", False):
        module.delete_adapter(list(module.peft_config))  # type: ignore[operator, arg-type]
    for path, original in _adapted(module):
        parent, _, name = path.rpartition(".")
        setattr(module.get_submodule(parent), name, original)


def _adapted(module: torch.nn.Module) -> list[tuple[str, torch.nn.Module]]:
    """(path, what was there) of every module that an adapter was put around."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    found: list[tuple[str, torch.nn.Module]] = []
    for path, each in module.named_modules():
        if isinstance(each, BaseTunerLayer):
            found.append((path, each.get_base_layer()))
        elif isinstance(each, AuxiliaryTrainingWrapper):
            found.append((path, each.original_module))
    return found


@contextmanager
def _as_before(module: torch.nn.Module) -> Iterator[None]:
    """Modes and `requires_grad` stay as they were; new modules have the whole's mode."""
    takes = {id(each): each.requires_grad for each in module.parameters()}
    modes = {id(each): each.training for each in module.modules()}
    whole = module.training
    yield
    for weight in module.parameters():
        if weight.is_floating_point():
            weight.requires_grad_(takes.get(id(weight), True))
    for each in module.modules():
        each.training = modes.get(id(each), whole)
