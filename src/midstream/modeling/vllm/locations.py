"""Locations of the engine itself, beside those of the model's modules."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

import torch

from midstream.errors import UnsupportedError
from midstream.interleaving.locations import LOGITS, SAMPLES, Location
from midstream.interleaving.run import current_run
from midstream.modeling.dialects import local_name
from midstream.modeling.navigating import Navigable
from midstream.modeling.vllm.unsupported import SCAN


class EngineModel(Navigable):
    """A model served by vLLM: the tree of vLLM's modules, and the engine's own hand-overs."""

    def __init__(self, root: torch.nn.Module, rename: Mapping[str, str | list[str]] | None = None):
        super().__init__(root, rename)
        self.tree.hint = local_name

    @property
    def logits(self) -> Any:
        """Logits of this request before grammar mask and sampler: ``[1, vocab]``."""
        return _read(LOGITS)

    @logits.setter
    def logits(self, value: Any) -> None:
        _write(LOGITS, value)

    @property
    def samples(self) -> Any:
        """The token id the sampler drew for this request: ``[1, 1]``, int64."""
        return _read(SAMPLES)

    @samples.setter
    def samples(self, value: Any) -> None:
        _write(SAMPLES, value)

    def scan(self, *args: Any, **settings: Any) -> NoReturn:
        """Refuse, and say what to write instead.

        Raises:
            UnsupportedError: always.
        """
        raise UnsupportedError(SCAN)


def _read(location: Location) -> Any:
    return current_run(f"`model.{location.side}`").at(location).read()


def _write(location: Location, value: Any) -> None:
    run = current_run(f"`model.{location.side}`")
    run.at(location).write(value, location.label(run.visit))
