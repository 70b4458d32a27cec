"""Capture of `async with` bodies."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Coroutine
from typing import Any

import pytest

from midstream.errors import BlockLayoutError, BlockSyntaxError, WithBlockNotFoundError
from midstream.tracing import Capture, Execution, bind

ran_in_place: list[int] = []


class Trace:
    """Captures its body, and runs it after a turn of the loop."""

    def __init__(self, *, fails: bool = False):
        self.fails = fails

    def __aenter__(self) -> Coroutine[Any, Any, Trace]:
        self.frame = sys._getframe(1)
        self.capture = Capture.begin(self.frame)
        return self._itself()

    async def _itself(self) -> Trace:
        return self

    def __aexit__(self, kind: Any, error: Any, traceback: Any) -> Coroutine[Any, Any, bool]:
        self.block = self.capture.finish(kind, error)
        return self._run()

    async def _run(self) -> bool:
        if self.block is None:
            return False
        await asyncio.sleep(0)
        if self.fails:
            raise LookupError("after the block")
        execution = Execution(self.block)
        execution.run()
        bind(self.frame, execution.saves())
        return True


def test_body_is_captured_and_bound() -> None:
    """The body runs when the `async with` ends, and its saves are bound in the coroutine (E4)."""

    async def main() -> list[int]:
        start = 3
        async with Trace() as trace:
            ran_in_place.append(start)
            found = [start, start + 1].save()
        assert trace.block is not None
        return found

    ran_in_place.clear()
    assert asyncio.run(main()) == [3, 4]
    assert ran_in_place == [3]
    assert sys.gettrace() is None or "coverage" in type(sys.gettrace()).__module__


def test_inside_try_and_loops() -> None:
    """Handlers around it do not see what skips the body; each turn of a loop captures anew."""

    async def main() -> list[list[int]]:
        found = []
        try:
            for index in range(3):
                async with Trace():
                    value = [index].save()
                found.append(value)
        except BaseException:  # noqa: BLE001
            found.append([-1])
        finally:
            found.append([9])
        return found

    assert asyncio.run(main()) == [[0], [1], [2], [9]]


def test_last_of_several_managers() -> None:
    """It may follow other managers in one header, and stand in a plain `with`."""

    async def main() -> list[int]:
        with pytest.raises(LookupError, match="after the block"):
            async with asyncio.timeout(5), Trace(fails=True):
                kept = [1].save()
        async with asyncio.Lock(), Trace():
            kept = [2].save()
        return kept

    assert asyncio.run(main()) == [2]


def test_tasks_do_not_mix() -> None:
    """Bodies of tasks that take turns are each bound in their own coroutine (E9)."""

    async def one(index: int) -> list[int]:
        async with Trace():
            value = [index].save()
        return value

    async def main() -> list[list[int]]:
        return await asyncio.gather(*map(one, range(5)))

    assert asyncio.run(main()) == [[index] for index in range(5)]


def test_what_a_body_cannot_hold() -> None:
    """`await` in the body and a leading `try` are refused, as in a plain `with` (C8)."""

    async def awaits() -> None:
        async with Trace():
            await asyncio.sleep(0)

    async def tries() -> None:
        async with Trace():
            try:
                ran_in_place.append(1)
            finally:
                pass

    with pytest.raises(BlockSyntaxError, match="cannot await"):
        asyncio.run(awaits())
    with pytest.raises(BlockLayoutError, match="starts with `try`"):
        asyncio.run(tries())


def test_entered_by_hand() -> None:
    """Outside an `async with` statement there is no body to capture."""

    async def main() -> None:
        await Trace().__aenter__()

    with pytest.raises(WithBlockNotFoundError):
        asyncio.run(main())


def test_idle_body() -> None:
    """A body that does nothing is a block too."""

    async def main() -> Any:
        async with Trace() as trace:
            pass
        return trace.block

    assert asyncio.run(main()).code.source.strip() == "pass"


def test_top_level_await(tmp_path: Any) -> None:
    """In code that awaits at its top level, as a notebook's cells, names become globals."""
    import ast
    import linecache
    from types import FunctionType

    name, text = "<cell>", "async with Trace():\n    found = [7].save()\n"
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    code = compile(text, name, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    names: dict[str, Any] = {"Trace": Trace}
    asyncio.run(FunctionType(code, names)())
    assert names["found"] == [7]
