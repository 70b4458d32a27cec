"""What blocks printed, warned about and failed with, in the caller's process."""

from __future__ import annotations

from collections.abc import Sequence

from midstream.errors import InterventionError
from midstream.modeling.vllm.payloads import BlockError, Record


def report(records: Sequence[Record]) -> None:
    """Print what the blocks printed, warn about what they warned about, and raise for failures.

    Raises:
        InterventionError: a block failed.
        Warning: the caller's filters turn a warning into an error, and no block failed.
    """
    try:
        tell(records)
    finally:
        raise_failures([record.error for record in records if record.error is not None])


def tell(records: Sequence[Record]) -> None:
    """Print what the blocks printed, and warn about what they warned about.

    Raises:
        Warning: the caller's filters turn a warning into an error.
    """
    for record in records:
        for text in record.prints:
            text.emit()
    for record in records:
        for warning in record.warnings:
            warning.emit()


def raise_failures(errors: Sequence[BlockError]) -> None:
    """Raise for the blocks that failed, if any did, see ``failure``.

    Ctrl-C that met a block in this process stays Ctrl-C.

    Raises:
        InterventionError: a block failed.
    """
    raised = failure(errors)
    if raised is not None:
        if isinstance(raised.__cause__, KeyboardInterrupt):
            raise raised.__cause__
        raise raised


def failure(errors: Sequence[BlockError]) -> InterventionError | None:
    """The exception for blocks that failed; None if none did.

    The text begins with the first failure's original type and message and holds every failure's
    traceback; the cause is the first one's original where its type can be imported.
    """
    if not errors:
        return None
    texts = [_text(error) for error in errors]
    if len(texts) > 1:
        texts[0] += f"\n\n{len(texts)} blocks of this trace failed. The others:"
    raised = InterventionError("\n\n".join(texts))
    raised.__cause__ = errors[0].rebuild()
    return raised


def _text(error: BlockError) -> str:
    text = f"{error.type_name}: {error.message}"
    return f"{text}\n\nIn the block:\n{error.traceback}" if error.traceback else text
