"""Which stage of a pipeline has which modules, and stand-ins for those of other stages."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from midstream.errors import UnsupportedError
from midstream.interleaving.locations import LOGITS, SAMPLES, SKIP, Location
from midstream.interleaving.node import Node, Tree
from midstream.interleaving.run import running


@dataclass
class Outline:
    """A module as other stages know it.

    Attributes:
        module, kind: where its class is.
        shown: what it shows of itself when it is printed.
        children: paths of the modules in it, by name.
        attributes: names that it has beside those of its class.
        embeds: whether it looks up token ids.
    """

    module: str
    kind: str
    shown: str
    children: dict[str, str]
    attributes: frozenset[str]
    embeds: bool


class Missing:
    """An attribute of a module that only another stage has."""

    def __init__(self, name: str):
        self.name = name


class _StandIn:
    """Mixed in before the class of a module of another stage; it has the module's tree only."""

    _shown = ""
    _attributes: frozenset[str] = frozenset()

    def extra_repr(self) -> str:
        return self._shown

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)  # type: ignore[misc]
        except AttributeError:
            if running() is None or name not in self._attributes:
                raise
            return Missing(name)


class Stages:
    """The stages of one pipeline, as one of them sees them.

    Args:
        outlines: of each stage, its modules by path.
        mine: which one this is.

    Attributes:
        count: how many there are.
        scripts: by block, what it has met on the stages before in the step that begins, and where
            it stands there.
    """

    def __init__(self, outlines: Sequence[Mapping[str, Outline]], mine: int):
        self._outlines, self.mine, self.count = outlines, mine, len(outlines)
        self.scripts: dict[Any, Any] = {}
        self._on: dict[str, list[int]] = {}
        for stage, modules in enumerate(outlines):
            for path in modules:
                self._on.setdefault(path, []).append(stage)
        self._spanning = {path for path in self._on if self._spans(path)}
        self._owners: dict[Location, int] = {}

    @property
    def last(self) -> int:
        """The last stage."""
        return self.count - 1

    @property
    def is_last(self) -> bool:
        """Whether this one is the last."""
        return self.mine == self.last

    def of(self, location: Location) -> int:
        """The stage that a location belongs to."""
        stage = self._owners.get(location)
        if stage is None:
            stage = self._owners[location] = self._owner(location)
        return stage

    def _owner(self, location: Location) -> int:
        if location in (LOGITS, SAMPLES):
            return self.last
        path = location.path
        if location.within is not None:
            path = f".{path}".partition(".source.")[0][1:]
        on = self._on.get(path, [self.mine])
        if len(on) == 1:
            return on[0]
        if path in self._spanning:
            return on[0] if location.side == "input" else on[-1]
        return on[0] if self._outlines[on[0]][path].embeds else on[-1]

    def _spans(self, path: str) -> bool:
        on, prefix = self._on[path], f"{path}." if path else ""
        inner = (stages for other, stages in self._on.items() if other.startswith(prefix))
        return len(on) > 1 and any(stages != on for stages in inner)

    def is_spanning(self, path: str) -> bool:
        """Whether a module lies on several stages, each of which has a part of it."""
        return path in self._spanning

    def having(self, paths: Sequence[str], what: str) -> int | None:
        """The stage that has some modules; None if all have them.

        Raises:
            UnsupportedError: no stage has all.
        """
        for path in paths:
            if path in self._spanning:
                raise UnsupportedError(
                    f"{what} is not supported with pipeline parallelism: '{path or 'model'}' lies "
                    "on several stages. Use the modules in it."
                )
        everywhere = set(range(self.count))
        known = [set(self._on[path]) for path in paths if path in self._on]
        found = everywhere.intersection(*known)
        if not found:
            raise UnsupportedError(
                f"{what} needs modules of several pipeline stages, and no stage has the modules of "
                "another. Use those of one stage at a time."
            )
        return None if found == everywhere else min(found)

    def refuse_spanning(self, location: Location) -> None:
        """Refuse what is no single place where a module lies on several stages.

        Raises:
            UnsupportedError: an operation inside it, or a skip of it.
        """
        path = location.path
        if location.within is not None:
            path = f".{path}".partition(".source.")[0][1:]
        elif location.side != SKIP:
            return
        if path in self._spanning:
            what = "skipping it" if location.side == SKIP else "its `.source`"
            raise UnsupportedError(
                f"'{path or 'model'}' lies on several pipeline stages, each of which runs a part "
                f"of it, so {what} is not supported. Use the modules in it."
            )

    def complete(self, tree: Tree) -> None:
        """Put stand-ins for the modules of other stages into this stage's tree."""
        for stage, modules in enumerate(self._outlines):
            if stage != self.mine:
                self._complete(tree, modules)

    def _complete(self, tree: Tree, modules: Mapping[str, Outline]) -> None:
        here = self._outlines[self.mine]
        made: dict[str, torch.nn.Module] = {}
        for path, outline in modules.items():
            for name, inner in outline.children.items() if path in here else ():
                known = here[path].children.get(name)
                if inner not in here and inner in modules:
                    _put(tree, tree.nodes[path], name, _made(modules, inner, made), inner)
                elif known is not None and known not in here:  # the head may be the embedding
                    tree.nodes[path]._children[name] = tree.nodes[inner]


def _put(tree: Tree, parent: Node, name: str, module: torch.nn.Module, path: str) -> None:
    mounted = name if name in parent._children else f"E_{name}"
    mounted = mounted if mounted in parent._children else name
    parent._children[mounted] = tree._build(module, path)


def _made(
    modules: Mapping[str, Outline], path: str, made: dict[str, torch.nn.Module]
) -> torch.nn.Module:
    """The stand-in at a path, with those in it."""
    if path not in made:
        outline = modules[path]
        made[path] = module = _blank(outline)
        for name, inner in outline.children.items():
            if inner in modules:
                module._modules[name] = _made(modules, inner, made)
    return made[path]


def _blank(outline: Outline) -> torch.nn.Module:
    try:
        found: Any = importlib.import_module(outline.module)
        for part in outline.kind.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError):  # a class that was made while the model was
        found = type(outline.kind.rpartition(".")[2], (torch.nn.Module,), {})
    kind = type(
        found.__name__,
        (_StandIn, found),
        {"_shown": outline.shown, "_attributes": outline.attributes},
    )
    module: torch.nn.Module = object.__new__(kind)
    torch.nn.Module.__init__(module)
    return module.eval()


def outline_of(tree: Tree) -> dict[str, Outline]:
    """The modules of one stage by path, without the places of those of other stages."""
    from vllm.model_executor.models.utils import PPMissingLayer

    nodes = {
        path: node
        for path, node in tree.nodes.items()
        if not isinstance(node._module, PPMissingLayer)
    }
    return {path: _outline(node) for path, node in nodes.items()}


def _outline(node: Node) -> Outline:
    from vllm.model_executor.layers.vocab_parallel_embedding import (
        ParallelLMHead,
        VocabParallelEmbedding,
    )

    module = node._module
    embeds = isinstance(module, VocabParallelEmbedding | torch.nn.Embedding)
    return Outline(
        type(module).__module__,
        type(module).__qualname__,
        module.extra_repr(),
        {name: child.path for name, child in node._children.items()},
        frozenset((*vars(module), *module._parameters, *module._buffers)),
        embeds and not isinstance(module, ParallelLMHead),
    )
