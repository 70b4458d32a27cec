"""`Model`: any PyTorch module, whose forwards can be read and edited."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch

from midstream.errors import UnsupportedError
from midstream.interleaving.beside import LocalInterleaver
from midstream.interleaving.copies import Rows
from midstream.interleaving.node import Tree
from midstream.interleaving.run import running
from midstream.modeling.dialects import engine_name, refuse_elsewhere
from midstream.modeling.failing import raise_failures
from midstream.modeling.local.batching import Batch, Inputs, stacked
from midstream.modeling.local.edits import Edit, edits_beside
from midstream.modeling.local.hosted import LocalBlock, failures
from midstream.modeling.local.running import Beside, Handing, Running
from midstream.modeling.local.scanning import Scanning
from midstream.modeling.local.session import Session
from midstream.modeling.local.tracer import Tracer
from midstream.modeling.navigating import Navigable
from midstream.tracing import Block

_LOCKS: WeakKeyDictionary[torch.nn.Module, Any] = WeakKeyDictionary()


class Host:
    """What a model and its edited copies have in common: the module, and the steps beside it.

    Attributes:
        lock: held while a thread runs the module, whichever model it is held as.
        session: the one under way.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self.lock = _LOCKS.setdefault(module, threading.RLock())
        self.session: Session | None = None
        self._interleaver: LocalInterleaver | None = None
        self._changes = 0

    def interleaver(self, tree: Tree) -> LocalInterleaver:
        """The steps of the tree's modules as they are now."""
        if self._interleaver is None or self._changes != tree.changes:
            self._interleaver, self._changes = LocalInterleaver(tree.modules), tree.changes
        return self._interleaver


class Model(Navigable):
    """A PyTorch module as users hold it: its attributes are the modules of the tree.

    Nothing of the module is changed: in a trace, the modules that its block asks for have their
    `forward` replaced on the instance, and have it back when the trace ends.

    Args:
        module: any `torch.nn.Module`.
        rename: further names for modules: path ("encoder.layers") or last part of one ("layers")
            to a name or a list of names.

    Raises:
        ValueError: a further name that is taken, or a renamed path that does not exist.
        TypeError: not a module.
    """

    def __init__(
        self, module: torch.nn.Module, *, rename: Mapping[str, str | list[str]] | None = None
    ):
        if not isinstance(module, torch.nn.Module):
            raise TypeError(f"Model(module) takes a torch.nn.Module; got {type(module).__name__}.")
        self._host = Host(module)
        self._edits: tuple[Block, ...] = ()
        super().__init__(module, rename)
        self.tree.grows, self.tree.hint = True, engine_name

    @property
    def module(self) -> torch.nn.Module:
        """The PyTorch module itself."""
        return self.tree.root._module

    @property
    def _session(self) -> Session | None:
        return self._host.session

    @_session.setter
    def _session(self, session: Session | None) -> None:
        self._host.session = session

    def __getitem__(self, key: int | str | slice) -> Any:
        """A submodule, or a slice of them, of a model that is a sequence of modules."""
        return self.tree.root[key]

    # Calls.

    def trace(
        self,
        *args: Any,
        block: Callable[..., Any] | None = None,
        trace: bool = True,
        **keywords: Any,
    ) -> Any:
        """Call the module with a block beside its forward, or with several in invokes.

        Args:
            args, keywords: what the module is called with. Without any, the body opens
                ``with tracer.invoke(...):`` for each input; all of them run in one batch.
            block: a function ``block(model, tracer)`` to run in place of a `with` body.
            trace: False calls the module without a block, and gives what it returns.

        Returns:
            The tracer: a context manager whose body is the block, or, with ``block``, done.

        Raises:
            InterventionError: a block failed (at the end of the `with`).
        """
        return self._begin("trace", args, keywords, block, trace=trace)

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        """Call the module: with the model's edits, or, in a block, beside the forward, untraced."""
        if running() is not None:
            return self.tree.root(*args, **keywords)
        return self.trace(*args, trace=False, **keywords)

    def scan(self, *args: Any, block: Callable[..., Any] | None = None, **keywords: Any) -> Any:
        """As ``trace``, for shapes: nothing is computed, and no weights are needed.

        The values that the block meets have shapes, dtypes and devices, and no numbers.

        Args:
            args, keywords, block: as of ``trace``.

        Returns:
            The tracer.
        """
        return self._begin("scan", args, keywords, block)

    def _begin(
        self,
        way: str,
        args: tuple[Any, ...],
        keywords: Mapping[str, Any],
        block: Callable[..., Any] | None,
        *,
        trace: bool = True,
    ) -> Any:
        if running() is not None:
            raise UnsupportedError(
                "A trace inside a trace is not supported. Save what the other trace needs, and "
                "trace again after the `with`."
            )
        inputs, settings = self._split(way, args, keywords)
        if not trace:
            return self._call(way, [inputs or Inputs((), {})], [], settings)
        tracer = Tracer(self, way, inputs, settings)
        if block is not None:
            tracer._take(Block(function=block))
        return tracer

    def _split(
        self, way: str, args: tuple[Any, ...], keywords: Mapping[str, Any]
    ) -> tuple[Inputs | None, dict[str, Any]]:
        """What a trace's inputs are, and what are settings of the call."""
        return self._inputs(way, args, keywords, {}), {}

    def _inputs(
        self,
        way: str,
        args: tuple[Any, ...],
        keywords: Mapping[str, Any],
        settings: Mapping[str, Any],
    ) -> Inputs | None:
        """One invoke's inputs; None if it has none."""
        return Inputs(args, keywords) if args or keywords else None

    def _batch(self, way: str, inputs: Sequence[Inputs], settings: Mapping[str, Any]) -> Batch:
        """What the call is made with."""
        return stacked(inputs)

    @contextmanager
    def _around(
        self, way: str, settings: Mapping[str, Any], running: Running | None
    ) -> Iterator[Callable[..., Any]]:
        """What is called, and what is set up around the call."""
        if way == "scan":
            scanning = Scanning(self.module)
            with scanning.entered():
                yield scanning
        else:
            yield self.module

    _after: Handing | None = None

    def _call(
        self,
        way: str,
        inputs: Sequence[Inputs | None],
        blocks: Sequence[LocalBlock],
        settings: Mapping[str, Any],
    ) -> Any:
        """Make one call for all invokes, with their blocks and the model's edits beside it.

        Raises:
            InterventionError: an edit failed.
        """
        with self._host.lock:
            given = [one for one in inputs if one is not None]
            batch = self._batch(way, given, settings)
            edits = edits_beside(self, batch.spans)
            beside = [*edits, *_beside(inputs, blocks, batch, len(self._edits))]
            interleaver = self._host.interleaver(self.tree)
            running = Running(interleaver, beside, batch.total, self._after) if beside else None
            with self._around(way, settings, running) as function:
                if running is None:
                    return function(*batch.args, **batch.kwargs)
                result = running.call(function, batch.args, batch.kwargs)
        raise_failures(failures(edit.block for edit in edits))
        return result

    # What stays.

    def edit(self, *, inplace: bool = False, **others: Any) -> Edit:
        """Make a block a part of the model: ``with model.edit() as (tracer, edited):``.

        It runs beside every later call of the edited model, before a trace's own block, once for
        each input.

        Args:
            inplace: edit this model (``with model.edit(inplace=True) as tracer:``) in place of an
                edited copy, which shares the module and leaves this model as it is.

        Raises:
            UnsupportedError: an argument that only engines have.
        """
        refuse_elsewhere(others)
        if others:
            raise UnsupportedError(
                f"`edit({next(iter(others))}=...)` chooses among the edits of an engine. Here each "
                "edited copy has its own: `with model.edit() as (tracer, edited):`."
            )
        edited = self
        if not inplace:
            edited = copy.copy(self)
        return Edit(self, edited)

    def clear_edits(self) -> None:
        """Drop this model's edits."""
        self._edits = ()

    def session(self) -> Session:
        """A scope of traces that see each other's variables, saved or not: `with model.session():`.

        Raises:
            UnsupportedError: (on entering) there is a session already.
        """
        return Session(self)


def _beside(
    inputs: Sequence[Inputs | None], blocks: Sequence[LocalBlock], batch: Batch, turn: int
) -> list[Beside]:
    """Blocks with their rows. One that sees the whole batch takes its own turn among the others."""
    spans, whole = iter(batch.spans), False
    found: list[Beside] = []
    for one, block in zip(inputs, blocks, strict=bool(blocks)):
        turn += found != [] and (one is None or whole)
        whole = one is None
        block.run.turn = turn
        found.append(Beside(block, Rows(0, batch.total) if one is None else next(spans)))
    return found
