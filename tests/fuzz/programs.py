"""From statements to functions that run, and what came of them to compare."""

from __future__ import annotations

import itertools
import linecache
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from midstream.errors import OutOfOrderError
from tests.fuzz import hooked
from tests.fuzz.dialects import Dialect, Generator, Lines, indented, numbers
from tests.fuzz.grammar import Statement, render

VARIABLES = ["r0, r1, r2 = X.clone(), X * 0.5, X + 1.0"]
_count = itertools.count()


@dataclass
class Outcome:
    """What came of one request.

    Attributes:
        kept: saved values by name.
        caught: names of the errors that the block caught.
        error: name of the error that ended the block.
        stopped: None, or whether the step in which it stopped keeps its token.
        outputs: what the model gave, one for each step.
    """

    kept: dict[str, Any] = field(default_factory=dict)
    caught: list[str] = field(default_factory=list)
    error: str | None = None
    stopped: bool | None = None
    outputs: list[torch.Tensor] = field(default_factory=list)


def define(head: str, lines: Lines, names: dict[str, Any]) -> Any:
    """Execute the source of a function, in a file that tracebacks and captures can read.

    Args:
        head: its `def` line.
        lines: its body.
        names: its globals.
    """
    return module([head, *indented(lines)], names)[head.split("(")[0].removeprefix("def ")]


def module(lines: Lines, names: dict[str, Any]) -> dict[str, Any]:
    """Execute the source of a module in such a file; give its globals."""
    source = "\n".join([*lines, ""])
    filename = f"<fuzz-{next(_count)}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    names["__name__"] = "fuzzed"
    try:
        exec(compile(source, filename, "exec"), names)
    finally:
        if next(_count) % 64 == 0:
            _forget()
    return names


def _forget() -> None:
    """Drop sources of earlier examples."""
    for name in [name for name in linecache.cache if name.startswith("<fuzz-")][:-32]:
        del linecache.cache[name]


def predicted_block(
    body: Sequence[Statement], names: dict[str, Any], outcome: Outcome
) -> hooked.Block:
    """The block as the oracle's generator."""
    known = {**vars(hooked), **names, "numbers": numbers, "torch": torch}
    known |= {"kept": outcome.kept, "caught": outcome.caught}
    lines = ["if False:", "    yield", *VARIABLES, *render(tuple(body), Generator())]
    make: Callable[[], hooked.Block] = define("def block():", lines, known)
    return make()


def traced_block(
    body: Sequence[Statement], names: dict[str, Any], say: Dialect, head: str
) -> Callable[..., None]:
    """The block as users write it."""
    known = {**names, "torch": torch, "OutOfOrderError": OutOfOrderError}
    made: Callable[..., None] = define(head, [*VARIABLES, *render(tuple(body), say)], known)
    return made


def difference(got: Outcome, right: Outcome, close: Callable[[Any, Any], bool]) -> str | None:
    """What differs between two outcomes; None if nothing does."""
    for what in ("error", "caught", "stopped"):
        if getattr(got, what) != getattr(right, what):
            return f"{what}: got {getattr(got, what)}, expected {getattr(right, what)}"
    if got.kept.keys() != right.kept.keys():
        return f"saved {sorted(got.kept)}, expected {sorted(right.kept)}"
    for name, value in right.kept.items():
        if not close(got.kept[name], value):
            return f"{name}: got {got.kept[name]}, expected {value}"
    if len(got.outputs) != len(right.outputs):
        return f"{len(got.outputs)} steps, expected {len(right.outputs)}"
    for step, (mine, theirs) in enumerate(zip(got.outputs, right.outputs, strict=True)):
        if not close(mine, theirs):
            return f"step {step} gave {mine}, expected {theirs}"
    return None
