"""How what a block leaves behind travels from an engine's process to the client's, without pickle.

The engine calls `pack` once a step with the closing `Record` of every request that ended in it;
the client calls `unpack` on the message. Small values ride in the message, large ones in one
shared memory segment (`segments`) that the client maps and the tensors keep alive.
"""

from __future__ import annotations

from midstream.modeling.vllm.payloads.codec import pack, unpack
from midstream.modeling.vllm.payloads.record import (
    BlockError,
    BlockWarning,
    OnDevice,
    Print,
    Record,
)

__all__ = ["BlockError", "BlockWarning", "OnDevice", "Print", "Record", "pack", "unpack"]
