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
    for record in records:
        for text in record.prints:
            text.emit()
    try:
        for record in records:
            for warning in record.warnings:
                warning.emit()
    finally:
        raise_failures([record.error for record in records if record.error is not None])


def raise_failures(errors: Sequence[BlockError]) -> None:
    """Raise for the blocks that failed, if any did.

    The text begins with the first failure's original type and message and holds every failure's
    traceback; the cause is the first one's original where its type can be imported. Ctrl-C that met
    a block in this process stays Ctrl-C.

    Raises:
        InterventionError: a block failed.
    """
    if not errors:
        return
    cause = errors[0].rebuild()
    if isinstance(cause, KeyboardInterrupt):
        raise cause
    texts = [_text(error) for error in errors]
    if len(texts) > 1:
        texts[0] += f"\n\n{len(texts)} blocks of this trace failed. The others:"
    raised = InterventionError("\n\n".join(texts))
    raised.__cause__ = cause
    raise raised


def _text(error: BlockError) -> str:
    text = f"{error.type_name}: {error.message}"
    return f"{text}\n\nIn the block:\n{error.traceback}" if error.traceback else text
