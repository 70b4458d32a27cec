"""Names under which midstream's data rides in vLLM's own messages, and a request's share of it."""

from __future__ import annotations

import msgspec


class Payload(msgspec.Struct, array_like=True):
    """What one request brings to the engine.

    Attributes:
        block: the block, as `midstream.tracing.shipping` wrote it; with ``common`` the rest of
            it. Empty for a request that runs installed edits only.
        keep: names that come back though the block does not save them: containers of the trace
            that all its requests fill.
        edits: numbers of the installed edits that run beside the request, chosen by the client.
        common: number of the part that the block has in common with others of its trace, which the
            workers were brought before the requests; 0 for none.
        stream: whether what the block appends to the lists it saves is sent at each step.
    """

    block: bytes = b""
    keep: list[str] = []
    edits: list[int] = []
    common: int = 0
    stream: bool = False


KEY = "midstream"
"""A block in `SamplingParams.extra_args`; records in `ModelRunnerOutput` and `EngineCoreOutput`;
the modules' further names in the engine's `additional_config`."""

RECORDS = "midstream-records"
"""Request id of the one extra output a step carries when blocks have closed in it."""

EDIT = "edit"
"""In a record's `extra`: number of the installed edit that the record is of."""

NEW = "new"
"""In a record's `extra`: the record holds only what has been appended to saved lists."""

SENT = "sent"
"""In a record's `extra`: how many items of each saved list have been sent before, by name."""

FAILED, STOPPED, STOPPED_BEFORE_TOKEN = "failed", "stopped", "stopped-before-token"
"""How a block ended its request; before its token was drawn, the step's token is dropped."""

STOP_REASON = "tracer.stop"
"""Stop reason of a request that its block ended."""

MODEL, TRACER, TOKENIZER, NODE = "model", "tracer", "tokenizer", "node"
"""References by which a block names the model's own objects; `node:<path>` is a module."""

STORED = "stored"
"""`stored:<name>` is what a client has put into the engine."""
