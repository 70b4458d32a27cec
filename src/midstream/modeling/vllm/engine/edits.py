"""Edits that clients have installed in one worker, for the requests that name them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from midstream.errors import MidstreamError
from midstream.tracing.shipping import loads


class InstalledEdit(NamedTuple):
    """A block that runs beside every request that names it.

    Attributes:
        id: the client's number for it; edits are installed in the order of their numbers.
        label: what errors call it.
        block: the block, as `midstream.tracing.shipping.dumps` wrote it. Each request reads it
            anew, so that no value it captured is shared between two of them.
    """

    id: int
    label: str
    block: bytes


class InstalledEdits:
    """The edits of one worker.

    A request takes what it needs of them when it is admitted, so an edit that is cleared lives on
    in the requests that run.
    """

    def __init__(self) -> None:
        self._edits: dict[int, InstalledEdit] = {}

    def install(self, edit: InstalledEdit, resolve: Callable[[str], Any]) -> None:
        """Take in an edit that can be rebuilt here.

        Args:
            resolve: gives the engine's own objects for references in the block.

        Raises:
            MidstreamError: a value of the block cannot be rebuilt in this process.
        """
        block = loads(edit.block, resolve)
        if block.code is not None:
            block.code.compiled()
        self._edits[edit.id] = edit

    def clear(self, ids: Iterable[int]) -> None:
        """Forget edits; twice is no error."""
        for edit_id in ids:
            self._edits.pop(edit_id, None)

    def chosen(self, ids: Iterable[int]) -> list[InstalledEdit]:
        """The edits with these numbers, in the order of installation.

        One that is not installed is an edit that fails: a worker must not end for it.
        """
        return [self._edits.get(i) or _missing(i) for i in sorted(ids)]

    def __len__(self) -> int:
        return len(self._edits)


def _missing(edit_id: int) -> InstalledEdit:
    return InstalledEdit(edit_id, f"number {edit_id}, which is not installed here", b"")


def problem_of(install: Callable[[], None]) -> str:
    """What kept something from being installed, as text; empty if nothing did.

    An exception would reach the client as vLLM's own, without its type.
    """
    try:
        install()
    except MidstreamError as error:
        return str(error)
    except Exception as error:  # noqa: BLE001  # what a value's own code raises ends no worker
        return f"{type(error).__name__}: {error}"
    return ""
