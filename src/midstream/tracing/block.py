"""A block: the code of a `with` body and the outside values it reads."""

from __future__ import annotations

import inspect
import linecache
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from hashlib import blake2b
from types import CodeType
from typing import Any, NamedTuple

import msgspec

from midstream.tracing.forms import Form, Gathering

__all__ = ["Block", "Call", "Code", "Compiled"]


class Code(msgspec.Struct, frozen=True, dict=True):
    """The source of a block: data, the same in every process.

    Attributes:
        source: the body's text exactly as in the file, whole lines.
        filename: the file as the running code names it.
        first_line: line of the file where `source` begins (1 is the first).
        name: qualified name of the enclosing function, or ``<module>``.
        flags: compiler flags of the ``from __future__`` imports in force.
        class_name: the enclosing class, which private names are mangled with, or None.
    """

    source: str
    filename: str
    first_line: int
    name: str = "<module>"
    flags: int = 0
    class_name: str | None = None

    @cached_property
    def digest(self) -> str:
        """Hash of every field: 32 hexadecimal digits."""
        return blake2b(msgspec.msgpack.encode(self), digest_size=16).hexdigest()

    @property
    def last_line(self) -> int:
        """Line of the file where `source` ends."""
        return self.first_line + self.source.removesuffix("\n").count("\n")

    def line(self, number: int) -> str:
        """Return line `number` of the file if it lies in this source, else an empty text."""
        if not self.first_line <= number <= self.last_line:
            return ""
        return self.source.split("\n")[number - self.first_line]

    def compiled(self) -> Compiled:
        """Return the executable form, compiled once while it stays among the last 512 used.

        Raises:
            BlockSyntaxError: the source cannot be compiled as a block.
        """
        return _compiled(self)


@lru_cache(maxsize=512)
def _compiled(code: Code) -> Compiled:
    from midstream.tracing.compiling import compile_code

    return compile_code(code)


class Call(NamedTuple):
    """A call ``name.method(...)`` in a block, or in a function inside it.

    Attributes:
        line: line of the file.
        is_bare: whether it is a statement of its own, so that nothing holds what it returns.
    """

    name: str
    method: str
    line: int
    is_bare: bool


@dataclass(frozen=True)
class Compiled:
    """A block's executable form.

    Attributes:
        code: module-level code with the user's file and line numbers.
        reads: names that it takes from outside.
        bare_saves: lines of ``x.save()`` whose value is bound to no name.
        bare_calls: the same for ``save(x)`` and ``package.save(x)``, as (first name, line): whether
            the name is midstream's is known at capture only.
        calls: its calls of methods of a name.
        attributes: for outside names used as ``name.attribute`` only, those attributes.
        plain: whether, given plain values, it does nothing but compute; see ``plain``.
        form: what its loop over steps does, if that is the same in each; see ``forms``.
    """

    code: CodeType
    reads: frozenset[str]
    bare_saves: tuple[int, ...] = ()
    bare_calls: tuple[tuple[str, int], ...] = ()
    calls: tuple[Call, ...] = ()
    attributes: Mapping[str, frozenset[str]] = field(default_factory=dict)
    plain: bool = False
    form: Form | Gathering | None = None


@dataclass
class Block:
    """What runs beside a forward pass: captured code, or a function called with (model, tracer).

    Attributes:
        code: the captured body; None for the function form.
        function: the function; None for a captured body.
        values: the outside names that the code reads, with the values they had at capture.
        listing: the function's source for tracebacks, where it can be read.
    """

    code: Code | None = None
    function: Callable[..., Any] | None = None
    values: dict[str, Any] = field(default_factory=dict)
    listing: Code | None = None

    def __post_init__(self) -> None:
        """Check the form and read the function's source."""
        if (self.code is None) == (self.function is None):
            raise TypeError("a Block has either code or a function, exactly one of them")
        if self.function is not None and not callable(self.function):
            raise TypeError(
                f"block={self.function!r} is no function: pass one that is called with "
                "(model, tracer)"
            )
        if self.function is not None and self.listing is None:
            self.listing = _listing(self.function)

    def line(self, filename: str, number: int) -> str:
        """Return a line's text as it was at capture; empty where it is not the block's."""
        code = self.code or self.listing
        return code.line(number) if code is not None and code.filename == filename else ""


def _listing(function: Callable[..., Any]) -> Code | None:
    """Read a function's source, for tracebacks only; None where there is none."""
    target = inspect.unwrap(function)
    target = getattr(target, "func", target)  # functools.partial
    try:
        code = inspect.unwrap(target).__code__
        linecache.checkcache(code.co_filename)
        lines, first = inspect.getsourcelines(code)
    except (AttributeError, OSError, TypeError):
        return None
    return Code("".join(lines), code.co_filename, first, code.co_qualname)
