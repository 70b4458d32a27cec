"""Objects kept in the engine: an SAE, a probe, a vector, used by name in blocks."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

import torch

from midstream.errors import CaptureError, TransportError
from midstream.modeling.vllm.engine.stored import Names
from midstream.modeling.vllm.modes import async_only, sync_only
from midstream.tracing import Block, Code
from midstream.tracing.shipping import dumps

if TYPE_CHECKING:
    from midstream.modeling.vllm.asynchronous.engine import AsyncEngine

_NOTHING = Code("pass\n", "<stored>", 1)


class Stored:
    """An object in the engine, as ``VLLM.put`` gives it.

    In a block its name stands for the object itself, on the engine's device. Here it is a handle.

    Attributes:
        name: what it is stored under.
    """

    def __init__(self, model: Storing, name: str):
        self._model, self.name = model, name

    @property
    def removed(self) -> bool:
        """Whether nothing is stored under the name any more."""
        return self.name not in self._model._stored

    def remove(self) -> None:
        """Take it out of the engine; twice is no error.

        Requests that run keep it until they end; later blocks and edits that use it fail.
        """
        sync_only(self._model.mode, "handle.remove()", "await handle.aremove()")
        with self._model._lock:
            if not self.removed:
                self._model._call("midstream_remove", self.name)
                del self._model._stored[self.name]

    async def aremove(self) -> None:
        """As ``remove``, on the event loop of an asynchronous model."""
        async_only(self._model.mode, "await handle.aremove()", "handle.remove()")
        if self._model._stored.pop(self.name, None) is not None:
            await self._model._after_running(self._remove_from)

    async def _remove_from(self, engine: AsyncEngine) -> None:
        if self.removed:  # nothing else has been stored under the name meanwhile
            await engine.call("midstream_remove", self.name)

    def _reference(self, model: object) -> str:
        """What stands for it in a block of a model.

        Raises:
            CaptureError: it is not in that model's engine.
        """
        if model is not self._model:
            raise CaptureError(f"'{self.name}' is stored in the engine of another model.")
        if self.removed:
            raise CaptureError(f"'{self.name}' has been removed from the engine: put it in again.")
        return self.name

    def __reduce__(self) -> Any:
        raise TypeError("a stored object's handle cannot be pickled: in a block it goes by name")

    def __repr__(self) -> str:
        return f"Stored({self.name!r}{', removed' if self.removed else ''})"


class Storing:
    """What a `VLLM` keeps in its engine."""

    mode: Literal["sync", "async"]
    _stored: dict[str, Stored]
    _lock: Any
    _call: Callable[..., list[Any]]
    _install: Callable[..., None]
    _ainstall: Callable[..., Awaitable[None]]
    _uncut: Callable[..., Any]
    _after_running: Callable[..., Awaitable[None]]
    _reference: Callable[[Any], str | None]

    @property
    def stored(self) -> Mapping[str, Stored]:
        """What is stored, by name: handles here, in a block the objects themselves."""
        return MappingProxyType(self._stored)

    def put(self, name: str, value: torch.Tensor | torch.nn.Module) -> Stored:
        """Keep a tensor or a module in the engine, for blocks and edits to use.

        It is copied to the engine's device once, in its own dtype, a module in evaluation mode; all
        requests share it, so writing into it in place is an error of the block. In a block, use the
        handle or ``model.stored[name]``. An object of the same name is replaced: requests that run
        keep the one they began with. Builds the engine if it is not up, and ends with it.

        Args:
            name: any text.
            value: a tensor, or a module whose tensors are parameters and buffers.

        Returns:
            Its handle.

        Raises:
            TypeError: the name is no text, or the value neither tensor nor module.
            TransportError: the value cannot travel, or has no place there.
        """
        sync_only(self.mode, "model.put(...)", "await model.aput(...)")
        data = self._checked(name, value)
        with self._lock:
            self._install("midstream_put", name, data)
            return self._stored.setdefault(name, Stored(self, name))

    async def aput(self, name: str, value: torch.Tensor | torch.nn.Module) -> Stored:
        """As ``put``, on the event loop of an asynchronous model."""
        async_only(self.mode, "await model.aput(...)", "model.put(...)")
        stored: Stored = await self._uncut(self._put(name, self._checked(name, value)))
        return stored

    async def _put(self, name: str, data: bytes) -> Stored:
        await self._ainstall("midstream_put", name, data)
        return self._stored.setdefault(name, Stored(self, name))

    def _checked(self, name: str, value: Any) -> bytes:
        """An object to be stored, as bytes."""
        if not isinstance(name, str):
            raise TypeError(f"A stored object's name is text; got {type(name).__name__}.")
        if not isinstance(value, torch.Tensor | torch.nn.Module):
            raise TypeError(
                f"put('{name}', ...) takes a tensor or a torch.nn.Module; got "
                f"{type(value).__name__}. Other values travel with the block that uses them."
            )
        try:
            return dumps(Block(code=_NOTHING, values={name: value}), self._reference)
        except TransportError as error:
            raise TransportError(
                f"'{name}' (a {type(value).__qualname__}) cannot travel to the engine: "
                f"{type(error.__cause__).__name__}: {error.__cause__}"
            ) from error.__cause__


def no_objects() -> dict[str, Stored]:
    """The handles of an engine in which nothing is stored."""
    return Names()
