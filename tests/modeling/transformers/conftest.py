"""Tiny checkpoints on the disk and their inputs, each made once."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from midstream.errors import MidstreamWarning
from midstream.modeling.transformers.inputs import Inputs
from midstream.modeling.transformers.loading import Checkpoint
from midstream.modeling.transformers.model import TransformersModel
from tests.support.checkpoints import checkpoint
from tests.support.hooking import leftovers
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


@pytest.fixture(scope="session")
def models(folder: Callable[[str], Path]) -> Callable[[str], TransformersModel]:
    """Give a model by its checkpoint's name, loaded in fp32."""
    made: dict[str, TransformersModel] = {}

    def get(name: str) -> TransformersModel:
        if name not in made:
            with warnings.catch_warnings():  # BERT has modules that are called `output`
                warnings.simplefilter("ignore", MidstreamWarning)
                made[name] = TransformersModel(folder(name), dtype=torch.float32, dispatch=True)
        return made[name]

    return get


@pytest.fixture
def traced(
    models: Callable[[str], TransformersModel],
) -> Iterator[Callable[[str], TransformersModel]]:
    """As ``models``; at the end of the test nothing is left on the modules."""
    used: dict[str, TransformersModel] = {}

    def get(name: str) -> TransformersModel:
        used[name] = models(name)
        return used[name]

    yield get
    assert not [name for name, model in used.items() if leftovers(model.module)]


@pytest.fixture
def llama(traced: Callable[[str], TransformersModel]) -> TransformersModel:
    """T-LLAMA."""
    return traced("T-LLAMA")
