"""Every exception midstream raises of its own.

::

    MidstreamError
    ├── CaptureError                      a `with` body cannot become a block
    │   ├── WithBlockNotFoundError        no source for the `with` statement
    │   │   └── SourceChangedError        the file no longer is the code that runs
    │   ├── BlockSyntaxError              also SyntaxError: `return`, `await`, ... in a block
    │   └── BlockLayoutError              also ValueError: body on the `with` line, or `try` first
    ├── NotInTraceError                   also ValueError: `.output` or `.save()` outside a block
    ├── OutOfOrderError                   also RuntimeError: the model already ran past a location
    ├── SourceNotAvailableError           also RuntimeError: no operations inside what is not Python
    ├── LimitExceededError                also RuntimeError: a block went over one of its limits
    ├── PromptError                       also ValueError: a prompt that is not exactly one prompt
    ├── TransportError                    also TypeError: a value that cannot travel
    ├── DataVersionError                  also ValueError: a block written by another version
    ├── InterventionError                 also RuntimeError: a block failed inside the engine
    ├── EngineBuildError                  also RuntimeError: the engine did not come up
    ├── EngineDeadError                   also RuntimeError: the engine died while serving
    ├── ServerError                       also ConnectionError: a midstream server refused or failed
    └── UnsupportedError                  also NotImplementedError: refused, with what to do instead

    MidstreamWarning (UserWarning)        everything midstream warns about
    ├── UnboundSaveWarning                a save whose value has no name to come back under
    └── StepsCutShortWarning              a loop asked for more steps than the request ran
"""

from __future__ import annotations

__all__ = [
    "BlockLayoutError",
    "BlockSyntaxError",
    "CaptureError",
    "DataVersionError",
    "EngineBuildError",
    "EngineDeadError",
    "InterventionError",
    "LimitExceededError",
    "MidstreamError",
    "MidstreamWarning",
    "NotInTraceError",
    "OutOfOrderError",
    "PromptError",
    "ServerError",
    "SourceChangedError",
    "SourceNotAvailableError",
    "StepsCutShortWarning",
    "TransportError",
    "UnboundSaveWarning",
    "UnsupportedError",
    "WithBlockNotFoundError",
]


class MidstreamError(Exception):
    """Base class of all midstream errors."""


class CaptureError(MidstreamError):
    """The body of a `with` statement could not be captured as a block."""


class WithBlockNotFoundError(CaptureError):
    """The source of the `with` statement could not be found."""


class SourceChangedError(WithBlockNotFoundError):
    """The source on disk is not the source the running code was compiled from."""


class BlockSyntaxError(CaptureError, SyntaxError):
    """The body is valid where it stands but not as a block (`return`, `await`, `yield`)."""


class BlockLayoutError(CaptureError, ValueError):
    """The body is laid out so that it cannot be skipped where it stands."""


class NotInTraceError(MidstreamError, ValueError):
    """A value of the forward pass, or a save, was asked for outside a running block."""


class OutOfOrderError(MidstreamError, RuntimeError):
    """A block asked for a location that this step has passed or does not reach."""


class SourceNotAvailableError(MidstreamError, RuntimeError):
    """A forward has no Python source whose operations could be waited for."""


class LimitExceededError(MidstreamError, RuntimeError):
    """A block went over a limit of time or memory; the text names it, its value and the fix."""


class PromptError(MidstreamError, ValueError):
    """The input of a trace is not exactly one usable prompt."""


class TransportError(MidstreamError, TypeError):
    """A value has no form in which it can travel between client and engine."""


class DataVersionError(MidstreamError, ValueError):
    """The bytes of a block were written by another version of midstream or Python."""


class InterventionError(MidstreamError, RuntimeError):
    """A block failed inside the engine.

    The text begins with the original type and message and holds a traceback with the user's
    file and line. ``__cause__`` is the original exception where its type can be imported.
    """


class EngineBuildError(MidstreamError, RuntimeError):
    """The engine did not come up; the text holds the root cause."""


class EngineDeadError(MidstreamError, RuntimeError):
    """The engine's process died; ``__cause__`` is vLLM's own error."""


class ServerError(MidstreamError, ConnectionError):
    """A midstream server refused a request or failed at it; the text is the server's.

    Attributes:
        status: the HTTP status; 0 if no answer came.
        kind: what the server calls the error, such as "PromptError".
    """

    def __init__(self, text: str, *, status: int = 0, kind: str = "") -> None:
        super().__init__(text)
        self.status, self.kind = status, kind


class UnsupportedError(MidstreamError, NotImplementedError):
    """midstream refuses this; the text says why and what to write instead."""


class MidstreamWarning(UserWarning):
    """Base class of all midstream warnings."""


class UnboundSaveWarning(MidstreamWarning):
    """A saved value, or a cache, is bound to no name, so it cannot come back."""


class StepsCutShortWarning(MidstreamWarning):
    """A loop over steps asked for more than the request ran."""
