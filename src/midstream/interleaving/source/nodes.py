"""`node.source`: the operations of a forward as users navigate them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from midstream.errors import SourceNotAvailableError
from midstream.interleaving.locations import Location
from midstream.interleaving.node import Node
from midstream.interleaving.source.copies import Template, template_of
from midstream.interleaving.source.functions import Found, find_function
from midstream.interleaving.source.listing import list_around, list_operations
from midstream.interleaving.source.operations import Site
from midstream.interleaving.structure import flatten

if TYPE_CHECKING:
    from midstream.interleaving.node import Tree
    from midstream.interleaving.run import Run


class Source:
    """The operations of one Python function, by name: calls, and values given to a name.

    ``self.act(x)`` is ``self_act_0``, the next call of it ``self_act_1``; ``x = ...`` is ``x_0``.
    Printing shows the function's text with the names beside it.

    Args:
        tree: the model's tree.
        path: what the function belongs to: a module, or an operation that calls it.
        found: the function; None where it is known only when it runs, so that any name is taken
            and checked then.
        what: how an error names the function.

    Raises:
        SourceNotAvailableError: the function has no Python source.
    """

    def __init__(self, tree: Tree, path: str, found: Found | None, what: str = ""):
        self._tree, self._path, self._found = tree, path, found
        self._template: Template | None = None
        self._sites: dict[str, Site] = {}
        if found is not None:
            self._template = template_of(found.function, what or describe_owner(path))
            self._sites = {site.name: site for site in self._template.sites}

    @property
    def path(self) -> str:
        """Dotted path below the model's root, such as "model.layers.0.mlp.source"."""
        return f"{self._path}.source".strip(".")

    def __getattr__(self, name: str) -> Operation:
        if name in ("_sites", "_template", "_path"):  # asked for by `copy` before they are there
            raise AttributeError(name)
        name, _, times = name.partition("[")  # as paths have it: "layer_0[2]"
        site = self._sites.get(name)
        if name.startswith("__") or (site is None and self._template is not None):
            raise AttributeError(self._unknown(name))
        return Operation(self, name, site, int(times.rstrip("]") or 0))

    def __setattr__(self, name: str, value: Any) -> None:
        if not name.startswith("_"):
            raise AttributeError(
                f"'{name}' of a source cannot be assigned. Assign an operation's `.output`, "
                "`.input` or `.inputs`."
            )
        object.__setattr__(self, name, value)

    def _unknown(self, name: str) -> str:
        return unknown_operation(describe_owner(self._path), name, self._sites)

    def __iter__(self) -> Iterator[Operation]:
        return (getattr(self, name) for name in self._sites)

    def __len__(self) -> int:
        return len(self._sites)

    def __bool__(self) -> bool:
        return True

    def __contains__(self, name: object) -> bool:
        return name in self._sites

    def __dir__(self) -> list[str]:
        return [*object.__dir__(self), *self._sites]

    def __repr__(self) -> str:
        if self._template is None:
            return f"<the function that {describe_owner(self._path)} calls, known when it runs>"
        return list_operations(self._template)


class Operation:
    """One call or assignment inside a forward.

    Inside a block ``output``, ``inputs`` and ``input`` are its values in this step, as a module's
    are: this request's rows, private, readable and assignable. Where the forward gets to it
    several times, in a loop, this is the first time, and ``operation[k]`` the k-th, counted from 0.
    """

    def __init__(self, source: Source, name: str, site: Site | None, count: int = 0):
        self._source, self._name, self._site, self._count = source, name, site, count
        self._tree = source._tree
        self._path = operation_path(source._path, name, count)
        self._enter, self._leave = operation_locations(source._path, name, count)

    # a module's own properties, which need `_tree`, `_enter` and `_leave`
    output, inputs, input = Node.output, Node.inputs, Node.input

    @property
    def path(self) -> str:
        """Dotted path below the model's root, such as "model.layers.0.mlp.source.self_act_0"."""
        return self._path

    def skip(self, value: Any) -> None:
        """Go on with a value in place of what the operation gives for this request.

        The operation still runs, for other requests and for what it does beside returning a value;
        this request's rows of what it returns are replaced.

        Args:
            value: what it would return, for this request's rows.

        Raises:
            ValueError: ``value`` has not the structure and shapes of what the operation returns, or
                that is no tensor.
            OutOfOrderError: the operation has begun.
        """
        run = self._tree.run(self, "skip")  # type: ignore[arg-type]  # has a node's path
        run.at(self._enter)
        run.at(self._leave).write(value, self._leave.label(run.visit))
        if not any(isinstance(leaf, torch.Tensor) for leaf in flatten(value)[0]):
            raise ValueError(
                f"'{self._path}' returns no tensor: what it does, it does to its arguments, and "
                "skipping it changes nothing. Edit those arguments, or what is made of them."
            )

    @property
    def source(self) -> Source:
        """The operations of the Python function that is called here.

        Raises:
            SourceNotAvailableError: there is none.
        """
        if self._site is not None and self._site.callee is None:
            raise SourceNotAvailableError(f"'{self._path}' is an assignment, which calls nothing.")
        try:
            callee = self._callee()
        except LookupError:
            return Source(self._tree, self._path, None)
        what = f"What '{self._path}' calls"
        node = self._tree.find(callee) if isinstance(callee, torch.nn.Module) else None
        if node is not None:
            return node.source
        return Source(self._tree, self._path, find_function(callee, what), what)

    def _callee(self) -> Any:
        template, found = self._source._template, self._source._found
        if template is None or found is None or self._site is None:
            raise LookupError(self._name)
        return template.callee(self._site, found.function, found.receiver)

    def __getitem__(self, count: int) -> Operation:
        if not isinstance(count, int) or isinstance(count, bool) or count < 0:
            raise IndexError(
                f"'{self._name}[{count!r}]': which time the forward gets to an operation is a "
                "whole number, counted from 0."
            )
        return Operation(self._source, self._name, self._site, count)

    __iter__: Callable[..., Any] | None = None  # it has as many times as the forward gets to it

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_") or isinstance(getattr(type(self), name, None), property):
            object.__setattr__(self, name, value)
        else:
            raise AttributeError(
                f"'{name}' of an operation cannot be assigned. Assign `.output`, `.input` or "
                "`.inputs`, or write into a value in place."
            )

    def __repr__(self) -> str:
        template = self._source._template
        if template is None or self._site is None:
            return f"<operation '{self._path}'>"
        return list_around(template, self._site)


def source_of(node: Node, run: Run | None) -> Source:
    """The operations of a module's forward.

    Args:
        node: the module's node.
        run: the executing block's run; None outside one.

    Raises:
        SourceNotAvailableError: the forward has no Python source.
    """
    forward = node._module.forward
    if run is not None:
        run.uses_source = True
        if run.interleaver is not None:
            forward = run.interleaver.replacing.forward_of(node.path)
    what = f"The forward of {describe_owner(node.path)} ({type(node._module).__name__})"
    return Source(node._tree, node.path, find_function(forward, what), what)


def find_source(tree: Tree, path: str) -> Source | Operation | None:
    """What stands at a path inside a forward; None if the path has no `source` in it.

    Raises:
        SourceNotAvailableError: the forward has no Python source.
        AttributeError: the forward has no such operation.
    """
    parts = path.split(".")
    if "source" not in parts:
        return None
    at = len(parts) - 1 - parts[::-1].index("source")
    owner = ".".join(parts[:at])
    outer = tree.nodes.get(owner) or find_source(tree, owner)
    if outer is None or isinstance(outer, Source) or len(parts) > at + 2:
        return None
    return getattr(outer.source, parts[at + 1]) if len(parts) > at + 1 else outer.source


def operation_path(owner: str, name: str, count: int = 0) -> str:
    """Path of an operation, in a loop with the time the forward gets to it."""
    times = f"[{count}]" if count else ""
    return f"{owner}.source.{name}{times}".strip(".")


def operation_locations(owner: str, name: str, count: int = 0) -> tuple[Location, Location]:
    """Where an operation's arguments and its result are handed over."""
    path = operation_path(owner, name, count)
    return Location(path, "input", owner), Location(path, "output", owner)


def describe_owner(path: str) -> str:
    """How errors name what a function belongs to."""
    return f"'{path}'" if path else "the model"


def unknown_operation(what: str, name: str, known: Any) -> str:
    """The text of an error about an operation that a function does not have."""
    listed = ", ".join(known) or "none"
    return f"{what} has no operation '{name}' in its source. Its operations: {listed}."
