"""What a thread needs to read tensors that another one computes."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator
from typing import TypeAlias

import torch

Launched: TypeAlias = tuple[torch.device, torch.cuda.Event]
"""A CUDA device, and an event behind what a thread has launched there."""

_LOCAL = threading.local()


def launched(devices: Iterable[torch.device]) -> list[Launched]:
    """What this thread has launched so far on some CUDA devices."""
    return [(device, torch.cuda.current_stream(device).record_event()) for device in devices]


@contextlib.contextmanager
def as_they_are(behind: Iterable[Launched] = ()) -> Iterator[None]:
    """Have tensors read as what they are, on streams of this thread's own.

    Args:
        behind: what another thread has launched; what this one does comes after it. The caller
            keeps the tensors until it has waited for what it launches here.
    """
    with contextlib.ExitStack() as entered:
        for device, event in behind:
            stream = _stream(device)
            entered.enter_context(torch.cuda.stream(stream))
            stream.wait_event(event)
        entered.enter_context(torch.no_grad())
        # A subclass of ours refuses some operations; here it is a tensor like any other.
        entered.enter_context(torch._C.DisableTorchFunctionSubclass())
        yield


def _stream(device: torch.device) -> torch.cuda.Stream:
    streams = _LOCAL.__dict__.setdefault("streams", {})
    if device not in streams:
        streams[device] = torch.cuda.Stream(device)
    return streams[device]  # type: ignore[no-any-return]
