"""What one request leaves behind when its block closes."""

from __future__ import annotations

import contextlib
import importlib
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from midstream.modeling.vllm.payloads.lookup import find_class, module_of

TEXT_LIMIT = 100_000
"""Characters of an error's message, and of its traceback, that travel."""

# One per file, as Python keeps one per module: a warning in a loop of traces shows once.
_REGISTRIES: dict[str, dict[Any, Any]] = {}


@dataclass(frozen=True)
class OnDevice:
    """A saved value that is to arrive on `device` instead of the CPU.

    The value travels through host memory all the same and comes back in this wrapper; whoever
    binds the saves moves it, since only they know whether the client may use the device.
    """

    value: Any
    device: str


@dataclass
class BlockError:
    """An exception of a block, in a form that needs none of the block's own types.

    Args:
        type_module: Module of the exception's type.
        type_name: Qualified name of the exception's type.
        message: ``str(exception)``, no more than `TEXT_LIMIT` characters of it.
        traceback: The traceback as text, with the user's file and line; as long at most.
        args: The exception's ``args``, texts cut alike; those that cannot travel become their
            ``repr``.
        notes: The exception's ``__notes__``.
        attributes: What else the exception carries, values as in `args`.
    """

    type_module: str
    type_name: str
    message: str
    traceback: str
    args: list[Any] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    attributes: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, error: BaseException, traceback_text: str) -> BlockError:
        """Describe `error`; never raises, whatever the exception's own methods do."""
        kind = type(error)
        return cls(
            module_of(kind),
            kind.__qualname__,
            _cut(_message_of(error)),
            _cut(traceback_text),
            _args_of(error),
            _notes_of(error),
            _attributes_of(error),
        )

    def rebuild(self) -> BaseException | None:
        """Make the exception itself, without running its type's own ``__init__``.

        Returns None where the type cannot be imported here, is no exception or cannot be made
        from its ``args``. The type's module is imported if it is not loaded yet.
        """
        try:
            return self._rebuild()
        except (Exception, SystemExit):  # noqa: BLE001 - importing and making run foreign code
            return None

    def _rebuild(self) -> BaseException | None:
        importlib.import_module(self.type_module)
        cls = find_class(self.type_module, self.type_name)
        if cls is None or not issubclass(cls, BaseException):
            return None
        made = cls.__new__(cls, *self.args)
        if not isinstance(made, cls):
            return None
        if not isinstance(made, OSError):  # which has taken its file names out of them
            made.args = tuple(self.args)
        _initialise_builtin_part(made, self.args)
        made.__dict__.update(self.attributes)
        for note in self.notes:
            made.add_note(note)
        return made


@dataclass
class BlockWarning:
    """A warning that a block raised, with the user's file and line."""

    category_module: str
    category_name: str
    message: str
    filename: str
    lineno: int

    @classmethod
    def of(cls, caught: warnings.WarningMessage) -> BlockWarning:
        """Describe a warning that ``warnings.catch_warnings(record=True)`` caught."""
        kind = caught.category
        text = str(caught.message)
        return cls(module_of(kind), kind.__qualname__, text, caught.filename, caught.lineno)

    def emit(self) -> None:
        """Warn in this process as if the user's line had run here.

        The category falls back to UserWarning where its class is not loaded in this process.

        Raises:
            Warning: This process's filters turn the warning into an error.
        """
        registry = _REGISTRIES.setdefault(self.filename, {})
        warnings.warn_explicit(
            self._instance(),
            None,
            self.filename,
            self.lineno,
            module=self._module(),
            registry=registry,
        )

    def _module(self) -> str:
        """What filters call the module: as Python derives it, but the main module by its name."""
        main = sys.modules.get("__main__")
        if getattr(main, "__file__", None) == self.filename:
            return "__main__"
        return self.filename.removesuffix(".py") or "<unknown>"

    def _instance(self) -> Warning:
        cls = find_class(self.category_module, self.category_name)
        if cls is not None and issubclass(cls, Warning):
            with contextlib.suppress(Exception):
                return cls(self.message)
        return UserWarning(self.message)


@dataclass
class Print:
    """Text that a block wrote to a standard stream."""

    stream: Literal["stdout", "stderr"]
    text: str

    def emit(self) -> None:
        """Write to this process's stream; what its encoding lacks is shown as escapes."""
        stream = getattr(sys, self.stream)
        if stream is None:  # as in a program without a console
            return
        try:
            stream.write(self.text)
        except UnicodeEncodeError as error:
            stream.write(
                self.text.encode(error.encoding, "backslashreplace").decode(error.encoding)
            )


@dataclass
class Record:
    """Everything a request's block sends home when it closes.

    Args:
        request_id: The request.
        saves: Saved values by name.
        error: The exception that ended the block, or that kept a save from travelling.
        warnings: What the block warned about, in order.
        prints: What the block printed, in order.
        extra: Anything else the two halves tell each other: numbers, text, lists, dicts.
        sender: In the engine, of whom nothing more comes; it does not travel.
    """

    request_id: str
    saves: dict[str, Any] = field(default_factory=dict)
    error: BlockError | None = None
    warnings: list[BlockWarning] = field(default_factory=list)
    prints: list[Print] = field(default_factory=list)
    extra: dict[str, Any] = field(default_factory=dict)
    sender: Any = field(default=None, compare=False, repr=False)


def _cut(text: str) -> str:
    if len(text) <= TEXT_LIMIT:
        return text
    return f"{text[:TEXT_LIMIT]} ... [midstream: cut, there were {len(text)} characters]"


def _message_of(error: BaseException) -> str:
    try:
        return str(error)
    except BaseException as second:  # noqa: BLE001 - a user's __str__ may raise anything
        return f"<no text: str() of the exception raised {type(second).__name__}>"


def _notes_of(error: BaseException) -> list[str]:
    try:
        return [note for note in error.__notes__ if isinstance(note, str)]
    except BaseException:  # noqa: BLE001 - most have none, and a user may set it to anything
        return []


def _attributes_of(error: BaseException) -> dict[str, Any]:
    try:
        return {str(name): value for name, value in vars(error).items() if name != "__notes__"}
    except BaseException:  # noqa: BLE001 - a user's __getattribute__ may raise anything
        return {}


def _raw_args_of(error: BaseException) -> tuple[Any, ...]:
    # The built-in attribute, which a type may hide behind a property of its own.
    args: tuple[Any, ...] = vars(BaseException)["args"].__get__(error)
    return args


def _args_of(error: BaseException) -> list[Any]:
    args = [_cut(arg) if type(arg) is str else arg for arg in _raw_args_of(error)]
    # An OSError moves its file names from `args` to fields; its constructor takes them last.
    if not isinstance(error, OSError):
        return args
    first, second = (vars(OSError)[name].__get__(error) for name in ("filename", "filename2"))
    if first is None:
        return args
    return [*args, first] if second is None else [*args, first, None, second]


def _initialise_builtin_part(error: BaseException, args: Sequence[Any]) -> None:
    # ImportError, SyntaxError, UnicodeDecodeError and others keep what str() shows in fields
    # that only their built-in __init__ sets; that one runs no code of the user's.
    base = next(cls for cls in type(error).__mro__ if cls.__module__ == "builtins")
    with contextlib.suppress(Exception):
        vars(base)["__init__"](error, *args)
