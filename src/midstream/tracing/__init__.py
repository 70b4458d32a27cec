"""A `with` body becomes a Block: captured, compiled, serialisable. No torch model here."""

from midstream.tracing.binding import bind
from midstream.tracing.block import Block, Code, Compiled
from midstream.tracing.capture import Capture, forget_skip
from midstream.tracing.execute import Execution, user_traceback
from midstream.tracing.saves import Scope, save, scoped
from midstream.tracing.shipping import dumps, loads

__all__ = [
    "Block",
    "Capture",
    "Code",
    "Compiled",
    "Execution",
    "Scope",
    "bind",
    "dumps",
    "forget_skip",
    "loads",
    "save",
    "scoped",
    "user_traceback",
]
