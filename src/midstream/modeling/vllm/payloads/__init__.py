"""How what a block leaves behind travels from an engine's process to the client's, without pickle.

The engine calls `pack` once a step with the closing `Record` of every request that ended in it;
the client calls `unpack` on the message. Small values ride in the message, large ones in shared
memory (`segments`) that the client maps and the tensors keep alive. Tensors of one shape that
follow each other in a container are one buffer; small ones are gathered on their device and come
to the host in chunks (`streaming`). What was copied for blocks in earlier steps is on its way
already, or there (`mirrors`): a record says where it lies (`places`), a cache says it once for
many requests (`sheets`, in the client `recorded`).

The tensors that a client receives are views of the mapping: nothing is copied out of it. Its name
is removed as it is mapped, so a segment takes memory for as long as one of its tensors lives, and
none can be left behind by a client that received it.
"""

from __future__ import annotations

from midstream.modeling.vllm.payloads.codec import pack, pack_apart, unpack, unpack_apart
from midstream.modeling.vllm.payloads.mirrors import Mirrors
from midstream.modeling.vllm.payloads.record import (
    BlockError,
    BlockWarning,
    OnDevice,
    Print,
    Record,
)

__all__ = [
    "BlockError",
    "BlockWarning",
    "Mirrors",
    "OnDevice",
    "Print",
    "Record",
    "pack",
    "pack_apart",
    "unpack",
    "unpack_apart",
]
