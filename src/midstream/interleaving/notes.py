"""Notes on the errors of blocks: what a reader needs beside the error's own text."""

from __future__ import annotations

from contextlib import suppress

TWO_DEVICES = (
    "A tensor made outside the block, or saved by an earlier one, is on the CPU, the model's "
    "values are on its device: move it where it is used, as in `value + vector.to(value.device)`."
)
"""What to do about tensors of two devices; PyTorch does not say where they come from."""


def annotate(error: BaseException, note: str) -> None:
    """Add a note to an error, unless the error, which may be anybody's, does not take one."""
    with suppress(Exception):
        BaseException.add_note(error, note)


def advise(error: BaseException) -> None:
    """Say what to write instead, where a block meets an error that users of every model meet."""
    if type(error) is RuntimeError and "tensors to be on the same device" in str(error):
        annotate(error, TWO_DEVICES)
