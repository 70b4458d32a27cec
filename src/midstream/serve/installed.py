"""Edits that clients have installed, each acting on its owner's requests."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple

from midstream.errors import TransportError
from midstream.modeling.vllm.remote.wire import EditInfo
from midstream.serve.access import Owner
from midstream.serve.problems import Problem

Call = Callable[..., Awaitable[Sequence[Any]]]
"""Calls a method of every worker."""


class ServedEdit(NamedTuple):
    """An installed edit and whose it is."""

    id: int
    name: str | None
    owner: Owner

    def acts_for(self, owner: Owner) -> bool:
        """Whether it runs beside an owner's requests."""
        return self.owner.admin or self.owner.id == owner.id


class Installed:
    """The edits of a server.

    Args:
        most: edits that one key may have installed.
    """

    def __init__(self, most: int):
        self._most = most
        self._ids = itertools.count(1)
        self._edits: dict[int, ServedEdit] = {}
        self._lock = asyncio.Lock()

    async def install(self, call: Call, owner: Owner, name: str | None, block: bytes) -> ServedEdit:
        """Install an edit in every worker.

        Raises:
            Problem: the owner has too many.
            TransportError: a worker could not take it in.
        """
        async with self._lock:
            if sum(edit.owner.id == owner.id for edit in self._edits.values()) >= self._most:
                raise Problem(429, f"This key has {self._most} edits installed; clear one first.")
            edit = ServedEdit(next(self._ids), name, owner)
            label = f"'{name}'" if name is not None else f"number {edit.id}"
            for problem in await call("midstream_install_edit", edit.id, label, block):
                if problem:
                    await call("midstream_clear_edits", [edit.id])
                    raise TransportError(problem)
            self._edits[edit.id] = edit
            return edit

    async def clear(self, call: Call, owner: Owner, edit_id: int | None) -> list[int]:
        """Take out one edit, or all of an owner's. Requests that run keep theirs.

        Raises:
            Problem: the owner has no such edit.
        """
        mine = [e.id for e in self._edits.values() if e.owner.id == owner.id]
        if edit_id is not None:
            there = edit_id in self._edits and (owner.admin or edit_id in mine)
            if not there:
                raise Problem(404, f"You have no edit of number {edit_id}.", param="id")
            mine = [edit_id]
        for each in mine:
            del self._edits[each]
        if mine:
            await call("midstream_clear_edits", mine)
        return mine

    def listed(self, owner: Owner) -> list[EditInfo]:
        """The edits that an owner has, or that act on its requests; for an admin all."""
        return [
            EditInfo(e.id, e.name, mine=e.owner.id == owner.id, everywhere=e.owner.admin)
            for e in self._edits.values()
            if owner.admin or e.acts_for(owner)
        ]

    def chosen(self, owner: Owner, names: Sequence[str] | None) -> list[int]:
        """Numbers of the edits that run beside a request.

        Args:
            owner: whose the request is.
            names: the named edits it asks for, beside all that have no name; None for all.

        Raises:
            ValueError: none that acts for the owner has one of the names.
        """
        acting = [edit for edit in self._edits.values() if edit.acts_for(owner)]
        known = list(dict.fromkeys(edit.name for edit in acting if edit.name is not None))
        for name in names or ():
            if name not in known:
                there = ", ".join(map(repr, known)) or "none"
                raise ValueError(f"edits: no edit is called '{name}'. Installed by name: {there}.")
        return [e.id for e in acting if names is None or e.name is None or e.name in names]
