"""What blocks printed, warned about and failed with, in the caller's process."""

from __future__ import annotations

from collections.abc import Sequence

from midstream.errors import InterventionError
from midstream.modeling import failing
from midstream.modeling.failing import Failure
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
    """Raise for the blocks that failed, if any did, see ``failing.raise_failures``.

    Raises:
        InterventionError: a block failed.
    """
    failing.raise_failures([_failure(error) for error in errors])


def failure(errors: Sequence[BlockError]) -> InterventionError | None:
    """The exception for blocks that failed, see ``failing.intervention``; None if none did."""
    return failing.intervention([_failure(error) for error in errors]) if errors else None


def _failure(error: BlockError) -> Failure:
    return Failure(error.type_name, error.message, error.traceback, error.rebuild())
