"""The module tree as users navigate it: attributes are submodules, `.output` is a location."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from greenlet import getcurrent

from midstream.errors import MidstreamWarning, UnsupportedError
from midstream.interleaving.locations import Location
from midstream.interleaving.run import current_run, running
from midstream.interleaving.skips import skip
from midstream.interleaving.structure import flatten

if TYPE_CHECKING:
    from midstream.interleaving.source import Source

_SERVED = ("output", "input", "inputs", "source", "skip", "get", "named_modules", "modules")

_HOOKED_CALL = (
    "`hook=True` is not supported: a module that a block calls runs beside the forward pass, and "
    "no location in it is served. Use what the call returns; for what is inside, call the parts "
    "one after the other."
)


class Node:
    """One module of the tree.

    Outside a block it navigates and prints. Inside one, ``output``, ``inputs`` and ``input`` are
    the values of the forward pass at this module, readable and assignable, and calling the node
    runs its module on the block's own values, untraced.
    """

    def __init__(self, module: torch.nn.Module, path: str, tree: Tree):
        self._module, self._path, self._tree = module, path, tree
        self._children: dict[str, Node] = {}
        self._aliases: dict[str, Node] = {}
        self._enter, self._leave = Location(path, "input"), Location(path, "output")

    @property
    def path(self) -> str:
        """Dotted path below the model's root; "" for the root."""
        return self._path

    @property
    def aliases(self) -> tuple[str, ...]:
        """Further names of submodules, as `rename` gave them."""
        return tuple(self._aliases)

    def _add_aliases(self, names: list[str], node: Node) -> None:
        for name in names:
            there = self._children.get(name) or self._aliases.get(name) or node
            if there is not node or hasattr(type(self), name):
                where = f"'{self._path}'" if self._path else "the model"
                raise ValueError(f"rename: {where} already has something called '{name}'.")
            if name not in self._children:
                self._aliases[name] = node

    @property
    def output(self) -> Any:
        """What the module returned in this step: this request's rows of every tensor in it.

        Raises:
            OutOfOrderError: the step has passed the module, or ends without calling it.
            NotInTraceError: outside a running block.
        """
        run = getattr(getcurrent(), "block_run", None)  # a visit has no time for more
        if run is None:
            run = self._tree.run(self, "output")
        return run.at(self._leave).read()

    @output.setter
    def output(self, value: Any) -> None:
        run = self._tree.run(self, "output")
        run.at(self._leave).write(value, self._leave.label(run.visit))

    @property
    def inputs(self) -> Any:
        """What the module is called with in this step: ``(args, kwargs)``, this request's rows."""
        return self._tree.run(self, "inputs").at(self._enter).read()

    @inputs.setter
    def inputs(self, value: Any) -> None:
        run = self._tree.run(self, "inputs")
        run.at(self._enter).write(value, self._enter.label(run.visit))

    @property
    def input(self) -> Any:
        """The first positional argument, else the first keyword argument."""
        run = getattr(getcurrent(), "block_run", None) or self._tree.run(self, "input")
        return run.at(self._enter).read_first(run.visit)

    @input.setter
    def input(self, value: Any) -> None:
        run = self._tree.run(self, "input")
        run.at(self._enter).write_first(value, run.visit)

    def skip(self, value: Any) -> None:
        """Let a value stand for what the module returns in this step, for this request's rows.

        The module is left out if all requests of the step skip it; one with attention or a state
        always runs, and the rows are overwritten. The block goes on behind the module: what lies
        inside it did not run, as far as the block can see.

        Args:
            value: what the module returns, with the same structure and shapes; see ``output``.

        Raises:
            ValueError: ``value`` has another structure or other shapes.
            OutOfOrderError: the module has been entered, or is not called in this step.
            NotInTraceError: outside a running block.
        """
        skip(self._tree.run(self, "skip"), self._path, value)

    @property
    def source(self) -> Source:
        """The operations of the module's Python forward, each a location of its own.

        Raises:
            SourceNotAvailableError: the forward is not written in Python.
        """
        from midstream.interleaving.source.nodes import source_of

        return source_of(self, running())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module on the block's own values. Nothing in it is traced.

        Tensors are copied first: kernels that work in place must not change the block's values.

        With ``hook=True``, where the tree can grow, the call's locations are served to the other
        blocks beside the same input.

        Raises:
            UnsupportedError: the module cannot be run beside the forward pass; or ``hook=True``
                in an engine.
        """
        self._tree.run(self, "a call")
        if kwargs.get("hook") is True and not _takes(self._module, "hook"):
            if not self._tree.grows:
                raise UnsupportedError(_HOOKED_CALL)
            return self._call_served(args, {k: v for k, v in kwargs.items() if k != "hook"})
        if self._path in self._tree.uncallable:
            raise UnsupportedError(
                f"'{self._path or 'model'}' cannot be called in a block: "
                f"{self._tree.uncallable[self._path]}."
            )
        return self.run_untraced(self._module, args, kwargs)

    def run_untraced(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run the module, or a method of it, on copies of the block's own tensors.

        Raises:
            NotInTraceError: outside a running block.
        """
        run = self._tree.run(self, "a call")
        leaves, build = flatten((args, kwargs))
        args, kwargs = build([_argument(leaf) for leaf in leaves])
        assert run.interleaver is not None
        paths = [self._path, *(leaf._path for leaf in leaves if isinstance(leaf, Node))]

        def call() -> Any:
            across = run.interleaver.across
            with run.interleaver.paused():
                if across is not None:
                    return across.call(run, self._path, function, args, kwargs)
                return function(*args, **kwargs)

        return run.interleaver.perform(run, paths, f"Calling '{self._path or 'model'}'", call)

    def param(self, name: str) -> torch.Tensor:
        """A parameter or buffer of the module, whole wherever the engine has it.

        ``module.weight`` is what the process that runs the block has of it: of several GPUs, its
        piece.

        Args:
            name: what the module calls it: "weight", "bias".

        Raises:
            AttributeError: it has none of that name.
            UnsupportedError: it is not known how it is divided among the GPUs.
        """
        return self._tree.parameter(self, name)

    def _call_served(self, args: Any, kwargs: Any) -> Any:
        """Run the module on copies of the block's own tensors, and serve what lies in it."""
        run = self._tree.run(self, "a call")
        leaves, build = flatten((args, kwargs))
        args, kwargs = build([_argument(leaf) for leaf in leaves])
        return run.interleaver.call_served(run, self._module, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in ("_children", "_aliases", "_module"):
            raise AttributeError(name)
        child = self._children.get(name) or self._aliases.get(name)
        if child is not None:
            return child
        try:
            value = getattr(self._module, name)
        except AttributeError:
            raise AttributeError(self._unknown(name)) from None
        return value if self._tree.shown is None else self._tree.shown(self, name, value)

    def _unknown(self, name: str) -> str:
        known = ", ".join(self._children) or "none"
        where = f"'{self._path}'" if self._path else "the model"
        return (
            f"{where} ({type(self._module).__name__}) has no submodule or attribute '{name}'. "
            f"Its submodules: {known}.{self._tree.hint(self, name)}"
        )

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_") or isinstance(getattr(type(self), name, None), property):
            object.__setattr__(self, name, value)
        elif isinstance(value, torch.nn.Module) and self._tree.grows:
            self._tree.attach(self, name, value)
        else:
            raise AttributeError(
                f"'{name}' of a module cannot be assigned. Assign `.output`, `.input` or "
                "`.inputs`, or write into a value in place."
            )

    def __getitem__(self, key: int | str | slice) -> Any:
        children = self._children
        where = f"'{self._path}'" if self._path else "the model"
        if isinstance(key, str):
            if key not in children:
                raise KeyError(f"{where} has no {key!r} among its {len(children)} submodules")
            return children[key]
        if isinstance(key, int) and not -len(children) <= key < len(children):
            raise IndexError(f"{where} has {len(children)} submodules; got the index {key}")
        return list(children.values())[key]

    def __len__(self) -> int:
        return len(self._children)

    def __iter__(self) -> Iterator[Node]:
        return iter(self._children.values())

    def __bool__(self) -> bool:
        return True

    def __dir__(self) -> list[str]:
        return [*object.__dir__(self), *self._children, *self._aliases]

    def get(self, path: str) -> Any:
        """The node at a dotted path below this one; a trailing served name gives its value."""
        found: Any = self
        for part in path.split(".") if path else ():
            found = (
                found[part] if isinstance(found, Node) and part.isdigit() else getattr(found, part)
            )
        return found

    def named_modules(self) -> list[tuple[str, Node]]:
        """(path, node) of all nodes below and including this one, children first."""
        found = [pair for child in self._children.values() for pair in child.named_modules()]
        return (
            [*found, (self._path, self)]
            if not found
            else [*dict(found).items(), (self._path, self)]
        )

    def modules(
        self, include_fn: Callable[[Node], bool] | None = None, names: bool = False
    ) -> list[Any]:
        """All nodes below and including this one, children first.

        Args:
            include_fn: keeps only nodes for which it is true.
            names: give (path, node) pairs.
        """
        pairs = [(p, n) for p, n in self.named_modules() if include_fn is None or include_fn(n)]
        return pairs if names else [node for _, node in pairs]

    def __repr__(self) -> str:
        if not self._children:
            return repr(self._module)
        lines = [f"{type(self._module).__name__}("]
        for name, child in self._children.items():
            names = [name, *(alias for alias, node in self._aliases.items() if node is child)]
            body = repr(child).replace("\n", "\n  ")
            lines.append(f"  ({', '.join(names)}): {body}")
        return "\n".join([*lines, ")"])


def _parameter(node: Node, name: str) -> torch.Tensor:
    found = getattr(node._module, name, None)
    if isinstance(found, torch.Tensor):
        return found
    held = ", ".join([*node._module._parameters, *node._module._buffers]) or "none"
    raise AttributeError(f"'{node.path or 'the model'}' has no parameter '{name}'. It has: {held}.")


def _argument(leaf: Any) -> Any:
    if isinstance(leaf, Node):
        return leaf._module
    return leaf.clone() if isinstance(leaf, torch.Tensor) else leaf


class Tree:
    """All nodes of one model. A module reachable by two paths is one node, at its first path.

    Args:
        root: the model.
        rename: further names, by module path ("model.layers") or last part of one ("layers"):
            a name or a list of names.

    Raises:
        ValueError: a renamed path does not exist, or a further name is taken.

    Attributes:
        nodes: the nodes by path, each at its first one.
        root: the node of the model itself.
        uncallable: paths of modules that a block must not call, with the reason.
        shown: gives what users get of a module's own attribute; called with the node, the
            attribute's name and its value.
        parameter: gives a module's whole parameter or buffer by its name.
        hint: what to write for a name that a module has not, as the end of the error's text.
        grows: whether users may attach modules.
        changes: how often its modules have become others.
    """

    def __init__(self, root: torch.nn.Module, rename: Mapping[str, str | list[str]] | None = None):
        self._by_module: dict[int, Node] = {}
        self.nodes: dict[str, Node] = {}
        self.uncallable: dict[str, str] = {}
        self.shown: Callable[[Node, str, Any], Any] | None = None
        self.hint: Callable[[Node, str], str] = lambda node, name: ""
        self.parameter: Callable[[Node, str], torch.Tensor] = _parameter
        self.grows, self.changes = False, 0
        self.root = self._build(root, "")
        for path, names in (rename or {}).items():
            self._alias(path, [names] if isinstance(names, str) else list(names))

    def _build(self, module: torch.nn.Module, path: str) -> Node:
        known = self._by_module.get(id(module))
        if known is not None:
            return known
        node = self._by_module[id(module)] = self.nodes[path] = Node(module, path, self)
        for name, child in module._modules.items():  # a child of two names has both
            if child is None:
                continue
            node._children[_mounted(name, path)] = self._build(child, f"{path}.{name}".strip("."))
        return node

    def attach(self, node: Node, name: str, module: torch.nn.Module) -> None:
        """Make a module a submodule of another, so that it is called and served as all are.

        Raises:
            AttributeError: the name is taken by what is no module.
            UnsupportedError: a block is running.
        """
        if running() is not None:
            raise UnsupportedError(
                f"'{name}' cannot be attached inside a block: attach it before the trace."
            )
        taken = hasattr(node._module, name) and name not in node._module._modules
        if taken or hasattr(type(node), name):
            raise AttributeError(
                f"'{name}' of '{node.path or 'the model'}' is taken, and by no module. Attach the "
                "module under another name."
            )
        setattr(node._module, name, module)
        self._forget(f"{node.path}.{name}".strip("."))
        node._children[_mounted(name, node.path)] = self._build(
            module, f"{node.path}.{name}".strip(".")
        )
        self.changes += 1

    def _forget(self, path: str) -> None:
        for known in [p for p in self.nodes if p == path or p.startswith(f"{path}.")]:
            node = self.nodes.pop(known)
            if self._by_module.get(id(node._module)) is node:
                del self._by_module[id(node._module)]

    def rebind(self, root: torch.nn.Module) -> None:
        """Take the modules of another tree of the same form, with weights for instance.

        Nodes stay the objects that users hold; modules that only the other tree has are added.
        """
        self._by_module.clear()
        self._renew(self.root, root)
        self.changes += 1

    def _renew(self, node: Node, module: torch.nn.Module) -> None:
        node._module = module
        self._by_module[id(module)] = self.nodes[node.path] = node
        there = {name for name, child in module._modules.items() if child is not None}
        for gone in [name for name in node._children if name.removeprefix("E_") not in there]:
            self._forget(node._children.pop(gone).path)
        for name, child in module._modules.items():
            if child is None:
                continue
            mounted = name if name in node._children else f"E_{name}"
            known = node._children.get(mounted)
            path = f"{node.path}.{name}".strip(".")
            if known is None:
                node._children[_mounted(name, node.path)] = self._build(child, path)
            elif id(child) not in self._by_module:
                self._renew(known, child)

    def _alias(self, path: str, names: list[str]) -> None:
        found = [
            (parent, node)
            for parent in self.nodes.values()
            for name, node in parent._children.items()
            if node.path == path or ("." not in path and name == path)
        ]
        if not found:
            raise ValueError(
                f"rename: no module is called '{path}'. Print the model to see its paths."
            )
        for parent, node in found:
            parent._add_aliases(names, node)
        if "." in path:  # a full path is also reachable from the root
            self.root._add_aliases(names, found[0][1])

    @property
    def modules(self) -> dict[str, torch.nn.Module]:
        """Modules by path, each once."""
        return {path: node._module for path, node in self.nodes.items()}

    @cached_property
    def other_names(self) -> dict[str, str]:
        """Paths by which a module is reached that is at another: further names, second places."""
        named = (
            (f"{parent.path}.{name}".strip("."), node.path)
            for parent in self.nodes.values()
            for name, node in [*parent._aliases.items(), *parent._children.items()]
        )
        return {name: path for name, path in named if name != path}

    def find(self, module: torch.nn.Module) -> Node | None:
        """The node of a module, if it belongs to the tree."""
        return self._by_module.get(id(module))

    def run(self, node: Node, what: str) -> Any:
        """The executing block's run."""
        return current_run(f"`{what}` of '{node.path or 'model'}'")


def _takes(module: torch.nn.Module, name: str) -> bool:
    """Whether the module's forward has a parameter of that name."""
    return name in inspect.signature(module.forward).parameters


def _mounted(name: str, path: str) -> str:
    """The attribute a submodule is reached by; one called like a served value moves aside."""
    if name not in _SERVED:
        return name
    where = f"{path}.{name}".strip(".")
    warnings.warn(
        f"The submodule '{where}' is called like a served value; it is mounted as 'E_{name}'.",
        MidstreamWarning,
        stacklevel=4,
    )
    return f"E_{name}"
