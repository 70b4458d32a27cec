"""What the blocks of one trace have in common, kept once."""

from __future__ import annotations

from midstream.tracing.block import Code
from midstream.tracing.shipping import Written

__all__ = ["Sharing"]


class Sharing:
    """The blocks of one trace, in order.

    Blocks of the same source share it, and those of their first values that are equal as bytes:
    what an object looked like when each block was captured decides, not whether it is the same one.
    """

    def __init__(self) -> None:
        self._blocks: list[Written] = []
        self._groups: dict[Code | None, _Group] = {}

    def add(self, written: Written) -> None:
        """Take in the next block; parts it shares with an earlier one are not kept twice."""
        self._blocks.append(written)
        if written.code is not None:  # functions come alone
            self._groups.setdefault(written.code, _Group(written)).take(written)

    def split(self) -> list[tuple[bytes, bytes]]:
        """Return what each block shares, and the rest of it.

        Returns:
            For ``Opened`` and ``Opened.block``; the shared bytes are the same object for all that
            share them. For a block that shares nothing: nothing, and the whole block.
        """
        heads = {
            code: group.first.head(group.common)
            for code, group in self._groups.items()
            if group.size > 1
        }
        return [self._pair(written, heads.get(written.code, b"")) for written in self._blocks]

    def _pair(self, written: Written, head: bytes) -> tuple[bytes, bytes]:
        if not head:
            return b"", written.head()
        return head, written.rest(self._groups[written.code].common)


class _Group:
    """Blocks of one source.

    Attributes:
        first: the first of them.
        size: how many there are.
        common: number of first values that all have alike.
    """

    def __init__(self, first: Written) -> None:
        self.first, self.size, self.common = first, 0, len(first.names)

    def take(self, written: Written) -> None:
        self.size += 1
        self.common = min(self.common, len(written.names))
        for index in range(self.common):
            if (
                written.names[index] != self.first.names[index]
                or written.parts[index] != self.first.parts[index]
            ):
                self.common = index
                return
            written.parts[index] = self.first.parts[index]
