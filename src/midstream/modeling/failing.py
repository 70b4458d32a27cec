"""The exception that tells a caller which blocks failed, and why."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from midstream.errors import InterventionError


class Failure(NamedTuple):
    """What one block failed with.

    Attributes:
        type_name: name of the exception's type.
        message: its text.
        traceback: as text, with the user's file and line; empty where there is none.
        cause: the exception itself, where there is one in this process.
    """

    type_name: str
    message: str
    traceback: str
    cause: BaseException | None


def intervention(failures: Sequence[Failure]) -> InterventionError:
    """The exception for blocks that failed.

    The text begins with the first failure's original type and message and holds every failure's
    traceback; the cause is the first one's original.
    """
    texts = [_text(failure) for failure in failures]
    if len(texts) > 1:
        texts[0] += f"\n\n{len(texts)} blocks of this trace failed. The others:"
    raised = InterventionError("\n\n".join(texts))
    raised.__cause__ = failures[0].cause
    return raised


def raise_failures(failures: Sequence[Failure]) -> None:
    """Raise for the blocks that failed, if any did. Ctrl-C that met a block stays Ctrl-C.

    Raises:
        InterventionError: a block failed.
    """
    if not failures:
        return
    if isinstance(failures[0].cause, KeyboardInterrupt):
        raise failures[0].cause
    raise intervention(failures)


def _text(failure: Failure) -> str:
    text = f"{failure.type_name}: {failure.message}"
    return f"{text}\n\nIn the block:\n{failure.traceback}" if failure.traceback else text
