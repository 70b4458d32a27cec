"""Notes on the errors of blocks."""

from __future__ import annotations

from typing import Any

import pytest

from midstream.interleaving.notes import TWO_DEVICES
from midstream.interleaving.run import Run

MIXED = (
    "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!"
)


class MixedError(RuntimeError):
    """Somebody's own error."""


@pytest.mark.parametrize(
    ("error", "notes"),
    [
        (RuntimeError(MIXED), [TWO_DEVICES]),
        (RuntimeError("something else"), []),
        (MixedError(MIXED), []),
    ],
    ids=["two devices", "another error", "another type"],
)
def test_an_error_about_two_devices_says_what_to_write(error: Any, notes: list[str]) -> None:
    """PyTorch names the devices; the note says which tensor has to move, and how."""

    def block() -> None:
        raise error

    run = Run(block)
    run.resume()
    assert run.error is error
    assert getattr(error, "__notes__", []) == notes


def test_an_error_that_takes_no_notes_stays_as_it_is() -> None:
    """An exception is the user's, and may have anything for its notes."""
    error = RuntimeError(MIXED)
    error.__notes__ = None  # type: ignore[assignment]

    def block() -> None:
        raise error

    run = Run(block)
    run.resume()
    assert run.error is error
    assert error.__notes__ is None
