"""Parts that blocks of one trace have in common, held by a worker until all of them have come."""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from functools import cached_property

from midstream.errors import MidstreamError
from midstream.tracing.shipping import Opened


class Common:
    """One such part; the blocks that share it keep it alive.

    Args:
        data: as `midstream.tracing.sharing` made it, or a whole block; None for a part that is not
            here.
        uses: how many blocks share it.
    """

    def __init__(self, data: bytes | None, uses: int = 1):
        self._data, self.uses = data, uses

    @cached_property
    def digest(self) -> int:
        """Number that depends on the contents only: the same in every process."""
        return zlib.crc32(self._data or b"")

    @cached_property
    def uses_source(self) -> bool:
        """Whether its text has an attribute of that name: a block may ask for operations."""
        return b".source" in (self._data or b"")

    @cached_property
    def opened(self) -> Opened:
        """The part, decoded when the first block needs it.

        Raises:
            DataVersionError: another version of midstream or Python wrote it.
            MidstreamError: it is not here. Not found out before, since only the block may fail.
        """
        if self._data is None:
            raise MidstreamError(
                "The part of this block that it shares with others of its trace is not in this "
                "worker: it was dropped before the block came, or never brought."
            )
        return Opened(self._data)


class Commons:
    """The parts of a worker whose blocks have not all come."""

    def __init__(self) -> None:
        self._parts: dict[int, Common] = {}

    def bring(self, parts: Iterable[tuple[int, bytes, int]]) -> None:
        """Take in parts: number, contents, and how many blocks will ask for it."""
        for number, data, uses in parts:
            self._parts[number] = Common(data, uses)

    def take(self, number: int) -> Common:
        """Give one block its part. The last one leaves nothing behind."""
        part = self._parts.get(number)
        if part is None:
            return Common(None)
        part.uses -= 1
        if not part.uses:
            del self._parts[number]
        return part

    def drop(self, numbers: Iterable[int]) -> None:
        """Forget parts that not all their blocks will ask for."""
        for number in numbers:
            self._parts.pop(number, None)

    def __len__(self) -> int:
        return len(self._parts)
