"""Declared taps: from the patterns users write to the locations an engine is built for."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import torch

from midstream.errors import SourceNotAvailableError
from midstream.interleaving.locations import Location
from midstream.interleaving.node import Node, Tree
from midstream.interleaving.source import Operation
from midstream.interleaving.source.nodes import unknown_operation

_HOW = (
    "A tap is a module's path with `.input` or `.output` behind it, or with "
    "`.source.<operation>.input` or `.output`; * stands for one part of the path."
)
_SIDES = ("input", "output")
_NO_SIDE = {
    "inputs": "all arguments are served at `.input`: write '{path}.input'.",
    "skip": "a skip cannot be declared: declare '{path}.output', and assign it in the block.",
    "logits": "logits are always served: leave it out.",
    "samples": "samples are always served: leave it out.",
    "source": "it names no operation, as in '{path}.source.<operation>.output'.",
}
_LISTS = (torch.nn.ModuleList, torch.nn.ModuleDict)


def check(taps: Any, engine: Mapping[str, Any]) -> tuple[str, ...]:
    """Check what is given as `taps`, and the engine arguments beside it.

    Args:
        engine: vLLM's engine arguments and the limits, as users gave them.

    Returns:
        The patterns.

    Raises:
        TypeError: it is no list of texts.
        ValueError: an argument that contradicts taps.
    """
    if isinstance(taps, str) or not isinstance(taps, Iterable):
        raise TypeError(f"taps={taps!r}: expected a list of texts, such as taps=[{str(taps)!r}].")
    patterns = tuple(taps)
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise TypeError(f"taps: {pattern!r} is a {type(pattern).__name__}, no text. {_HOW}")
    if patterns:
        _refuse_contradictions(engine)
    return patterns


def _refuse_contradictions(engine: Mapping[str, Any]) -> None:
    if engine.get("enforce_eager"):
        raise ValueError(
            "taps= and enforce_eager=True contradict each other: graphs are captured for taps, and "
            "an eager engine has none. Leave one out; without taps every location is served."
        )
    if engine.get("max_graphs") == 0:
        raise ValueError(
            "taps= and max_graphs=0 contradict each other: graphs are captured for taps. Leave one "
            "out."
        )
    mode = _graph_mode(engine.get("compilation_config"))
    if mode in ("FULL", "NONE"):
        raise ValueError(
            f"taps= and a compilation_config with cudagraph_mode={mode} contradict each other: "
            "decode steps with blocks run as graphs with breaks at the taps, prompts with blocks "
            "without graphs. Leave cudagraph_mode out, or choose 'FULL_AND_PIECEWISE' or "
            "'FULL_DECODE_ONLY'."
        )


def _graph_mode(config: Any) -> str:
    """Name of the graph mode that a compilation config asks for; "" if it leaves it open."""
    found = (
        config.get("cudagraph_mode")
        if isinstance(config, Mapping)
        else getattr(config, "cudagraph_mode", None)
    )
    return "" if found is None else str(getattr(found, "name", found)).upper()


def resolve(patterns: Sequence[str], tree: Tree) -> tuple[Location, ...]:
    """The locations that taps name: in the patterns' order, those of one in the tree's.

    Raises:
        ValueError: a tap names nothing; with what there is.
    """
    found = (location for pattern in patterns for location in _resolve(pattern, tree))
    return tuple(dict.fromkeys(found))


def as_data(locations: Iterable[Location]) -> list[list[str | None]]:
    """Locations as plain data, for the engine's configuration."""
    return [list(location) for location in locations]


class _Written(NamedTuple):
    """A pattern in its parts; without ``operations`` it is a module's own side."""

    pattern: str
    path: tuple[str, ...]
    operations: tuple[str, ...]
    side: str


def _resolve(pattern: str, tree: Tree) -> list[Location]:
    written = _parse(pattern)
    nodes = _called(written, _matching(written, tree))
    if not nodes:
        _refuse_unknown(written, tree)
    if not written.operations:
        return [Location(node.path, written.side) for node in nodes]
    return _operations(written, nodes)


def _parse(pattern: str) -> _Written:
    *path, side = pattern.split(".")
    shown = ".".join(path)
    if side not in _SIDES:
        why = _NO_SIDE.get(side, "it ends in no side of a module.").format(path=shown)
        _refuse(pattern, f"{why} {_HOW}")
    if "" in path:
        _refuse(pattern, f"a part of the path is empty. {_HOW}")
    at = path.index("source") if "source" in path else len(path)
    words, operations = path[at::2], path[at + 1 :: 2]
    if len(words) != len(operations) or any(word != "source" for word in words):
        _refuse(pattern, f"an operation is written `.source.<operation>`. {_HOW}")
    return _Written(pattern, tuple(path[:at]), tuple(operations), side)


def _matching(written: _Written, tree: Tree) -> list[Node]:
    """The modules a path names, each at its first place."""
    found = [tree.root]
    for part in written.path:
        literal, fits = "*" not in part, _expression(part)
        nodes: list[Node] = []
        for parent in found:
            for name, child in _named(parent, aliases=literal):
                if not fits.fullmatch(name):
                    continue
                if name in parent._aliases or child.path == f"{parent.path}.{name}".strip("."):
                    nodes.append(child)
                elif literal:
                    _refuse(
                        written.pattern,
                        f"'{parent.path}.{name}' is the module '{child.path}', which is tapped by "
                        "that path: it is one module at two places.",
                    )
        found = list(dict.fromkeys(nodes))
    return found


def _named(parent: Node, *, aliases: bool) -> Iterator[tuple[str, Node]]:
    """The submodules of a node by the names that a tap may call them."""
    for name, child in parent._children.items():
        own = child.path == f"{parent.path}.{name.removeprefix('E_')}".strip(".")
        yield (name.removeprefix("E_") if own else name), child
    if aliases:
        yield from parent._aliases.items()


def _expression(part: str) -> re.Pattern[str]:
    return re.compile(re.escape(part).replace(r"\*", "[^.]+"))


def _called(written: _Written, nodes: Sequence[Node]) -> list[Node]:
    """The nodes without lists of modules, which no model calls."""
    called = [node for node in nodes if not isinstance(node._module, _LISTS)]
    if nodes and not called:
        _refuse(
            written.pattern,
            f"'{nodes[0].path}' is a list of modules, which no model calls: write "
            f"'{nodes[0].path}.*.{written.side}' for those in it.",
        )
    return called


def _operations(written: _Written, nodes: Sequence[Node]) -> list[Location]:
    """The operation in those of the modules' forwards that have it."""
    owners: Sequence[Node | Operation] = nodes
    for part in written.operations:
        found: list[Operation] = []
        problems: list[str] = []
        for owner in owners:
            try:
                found += _inside(owner, part, written)
            except (LookupError, SourceNotAvailableError) as problem:
                problems.append(str(problem.args[0]))
        if not found:
            _refuse(written.pattern, problems[0])
        owners = found
    return [each._enter if written.side == "input" else each._leave for each in found]


def _inside(owner: Node | Operation, part: str, written: _Written) -> list[Operation]:
    """The operations of a function that a part of a pattern names.

    Raises:
        LookupError: there is none.
        SourceNotAvailableError: the function has no Python source.
    """
    source, what = owner.source, f"'{owner.path}'" if owner.path else "the model"
    if source._template is None:
        raise LookupError(
            f"what {what} calls is known only when it runs, so that its operations cannot be "
            "declared."
        )
    name, _, times = part.partition("[")
    fits = _expression(name)
    names = [known for known in source._sites if fits.fullmatch(known)]
    if not names:
        near = difflib.get_close_matches(name, source._sites, n=1)
        hint = f" Did you mean '{near[0]}'?" if near else ""
        raise LookupError(unknown_operation(what, part, source._sites) + hint)
    number = times.removesuffix("]")
    if "[" in part and (not number.isdecimal() or number == times):
        _refuse(written.pattern, f"'{part}' is not written as '{names[0]}[2]' is.")
    return [getattr(source, known)[int(number or 0)] for known in names]


def _refuse_unknown(written: _Written, tree: Tree) -> NoReturn:
    behind = "".join(f".source.{operation}" for operation in written.operations)
    paths = [path for path, node in tree.nodes.items() if not isinstance(node._module, _LISTS)]
    if any("*" in part for part in written.path):
        paths = list(dict.fromkeys(re.sub(r"(?<![^.])\d+(?![^.])", "*", path) for path in paths))
    asked = ".".join(written.path)
    plain = asked.removeprefix("model.")
    near = [plain] if plain != asked and plain in paths else []
    near += [each for each in difflib.get_close_matches(asked, paths, n=3) if each not in near]
    shown = ", ".join(f"'{path}{behind}.{written.side}'" for path in near)
    hint = f"Near it: {shown}. " if near else ""
    _refuse(
        written.pattern,
        f"it names no module of this model. {hint}{_HOW} Print the model to see its paths.",
    )


def _refuse(pattern: str, why: str) -> NoReturn:
    raise ValueError(f"taps: {pattern!r}: {why}")
