"""Tiny checkpoints on the disk and their inputs, each made once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from midstream.modeling.transformers.inputs import Inputs
from midstream.modeling.transformers.loading import Checkpoint
from tests.support.checkpoints import checkpoint
from tests.support.local_checkpoints import KINDS, save


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Give the folder of a checkpoint by its name."""
    made: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in KINDS:
            return checkpoint(name, with_tokenizer=True)
        if name not in made:
            made[name] = save(name, tmp_path_factory.mktemp(name))
        return made[name]

    return get


@pytest.fixture(scope="session")
def local(folder: Callable[[str], Path]) -> Callable[[str], Checkpoint]:
    """Give a loaded checkpoint by its name, in fp32."""
    made: dict[str, Checkpoint] = {}

    def get(name: str) -> Checkpoint:
        if name not in made:
            made[name] = Checkpoint(folder(name))
            made[name].load()
        return made[name]

    return get


@pytest.fixture(scope="session")
def inputs(local: Callable[[str], Checkpoint]) -> Callable[[str], Any]:
    """Give (module, its inputs) by the checkpoint's name."""
    made: dict[str, Inputs] = {}

    def get(name: str) -> Any:
        module = local(name).load()
        if name not in made:
            made[name] = Inputs(module, local(name))
        return module, made[name]

    return get
