"""Errors and warnings of a block, put together again in the client."""

from __future__ import annotations

import sys
import threading
import types
import warnings
from typing import Any

import pytest

from midstream.modeling.vllm.payloads import BlockError, BlockWarning, Record, pack, unpack
from midstream.modeling.vllm.payloads.lookup import find_class, module_of
from midstream.modeling.vllm.payloads.record import TEXT_LIMIT


class PickyError(Exception):
    """An exception whose own constructor takes other arguments than its `args`."""

    def __init__(self, code: int, *, detail: str) -> None:
        super().__init__(f"{code}: {detail}")
        self.detail = detail


class StrictError(Exception):
    """An exception that cannot be made from its `args`."""

    def __new__(cls, *args: Any, secret: str = "") -> StrictError:
        """Refuse to be made without the secret."""
        if not secret:
            raise SystemExit("no secret")
        return super().__new__(cls, *args)


class MuteError(Exception):
    """An exception without a usable text."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


class MyImportError(ImportError):
    """A subclass of a built-in that keeps its text outside `args`."""


class MyWarning(UserWarning):
    """A warning of the user's own."""


def sent(error: BaseException) -> BlockError:
    """Return an exception as the client sees it."""
    record = Record("r", error=BlockError.of(error, "the traceback"))
    [got] = unpack(pack([record], owner="1.2.3.4"))
    assert got.error is not None
    return got.error


@pytest.mark.parametrize(
    "error",
    [
        ValueError("bad", 3),
        KeyError("k"),
        OSError(2, "No such file", "name"),
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid"),
        MyImportError("cannot import"),
        SyntaxError("bad syntax", ("f.py", 1, 2, "text")),
        SystemExit(3),
        PickyError(3, detail="why"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_exception_is_rebuilt_with_type_args_and_text(error: BaseException) -> None:
    """The rebuilt exception has the original's type, `args` and text (O10, C94)."""
    error.add_note("a note")
    got = sent(error)
    rebuilt = got.rebuild()
    assert type(rebuilt) is type(error)
    assert (rebuilt.args, str(rebuilt)) == (error.args, str(error))
    assert rebuilt.__notes__ == ["a note"]
    assert (got.message, got.traceback) == (str(error), "the traceback")


def test_an_exception_brings_its_attributes() -> None:
    """They are the original's, not what its `__init__` would set; the rest comes as its repr."""
    error = PickyError(3, detail="why")
    error.detail = "because"
    error.lock = lock = threading.Lock()
    rebuilt = sent(error).rebuild()
    assert rebuilt.detail == "because"
    assert rebuilt.lock == repr(lock)


@pytest.mark.parametrize(
    "error",
    [
        BlockError("no.such.module", "SomeError", "m", "t"),
        BlockError("", "SomeError", "m", "t"),
        BlockError("builtins", "NoSuchError", "m", "t"),
        BlockError("builtins", "dict", "m", "t"),
        BlockError(__name__, "StrictError", "m", "t"),
        BlockError("builtins", "ExceptionGroup", "m", "t", ["text", "no exceptions"]),
    ],
    ids=lambda error: f"{error.type_module}.{error.type_name}",
)
def test_what_cannot_be_rebuilt_is_none(error: BlockError) -> None:
    """An unknown, wrong or refusing type gives None and never raises (O10, C94)."""
    assert error.rebuild() is None


def test_a_module_that_fails_to_import_gives_none(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A module is imported to rebuild an exception; one that exits on import is survived."""
    (tmp_path / "exits_on_import.py").write_text("raise SystemExit(1)")
    (tmp_path / "defines_error.py").write_text("class FarError(Exception): pass")
    monkeypatch.syspath_prepend(tmp_path)
    assert BlockError("exits_on_import", "E", "m", "t").rebuild() is None
    rebuilt = BlockError("defines_error", "FarError", "m", "t", ["a"]).rebuild()
    assert type(rebuilt).__name__ == "FarError"
    monkeypatch.delitem(sys.modules, "defines_error")


def test_an_exception_without_text_is_described() -> None:
    """An exception whose `__str__` raises still becomes an error of the record."""
    assert "RuntimeError" in sent(MuteError()).message


def test_the_users_script_has_one_name_in_all_processes() -> None:
    """A class of the user's script is looked up in `__main__`, whatever a child called it."""
    assert module_of(type("E", (Exception,), {"__module__": "__mp_main__"})) == "__main__"


def test_looking_a_class_up_runs_no_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lazy modules are not asked for attributes they have not loaded."""
    module = types.ModuleType("lazy_module")
    vars(module)["__getattr__"] = lambda name: pytest.fail("the module's __getattr__ ran")
    monkeypatch.setitem(sys.modules, "lazy_module", module)
    assert find_class("lazy_module", "Anything") is None
    assert find_class("lazy_module", "Anything.inner") is None
    assert find_class("not_a_module", "Anything") is None


def caught_warning(message: Warning | str, category: type[Warning] | None = None) -> BlockWarning:
    """Describe a warning raised on a known line, as the engine does."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.warn_explicit(message, category, "/home/me/run 1.py", 12)  # type: ignore[arg-type]
    return BlockWarning.of(caught[0])


@pytest.mark.parametrize("category", [UserWarning, DeprecationWarning, MyWarning])
def test_a_warning_is_caught_in_the_client_with_the_users_line(category: type[Warning]) -> None:
    """Category, text, file and line are those of the block (O11, C97)."""
    with pytest.warns(category, match="careful") as caught:
        caught_warning("careful", category).emit()
    assert (caught[0].filename, caught[0].lineno) == ("/home/me/run 1.py", 12)
    assert caught[0].category is category


def test_a_warning_of_an_unknown_category_is_a_user_warning() -> None:
    """A category the client lacks, or that is no warning, falls back to UserWarning."""
    for module, name in (("not.loaded", "OddWarning"), ("builtins", "ValueError")):
        with pytest.warns(UserWarning, match="careful") as caught:
            BlockWarning(module, name, "careful", "f.py", 1).emit()
        assert caught[0].category is UserWarning


def test_the_clients_filters_decide() -> None:
    """A filter that makes errors of warnings raises from `emit`; one that ignores is silent."""
    warning = caught_warning("careful", MyWarning)
    with warnings.catch_warnings():
        warnings.simplefilter("error", MyWarning)
        with pytest.raises(MyWarning, match="careful"):
            warning.emit()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("ignore", MyWarning)
        warning.emit()
    assert caught == []


def test_warning_of_the_main_script_is_of_its_module(monkeypatch: pytest.MonkeyPatch) -> None:
    """Filters for `__main__`, as Python has one by default, see the script's warnings."""
    monkeypatch.setattr(sys.modules["__main__"], "__file__", "script.py")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("ignore")
        warnings.filterwarnings("default", module="__main__")
        for file in ("script.py", "other.py"):
            BlockWarning("builtins", "DeprecationWarning", "old", file, 1).emit()
    assert [warning.filename for warning in caught] == ["script.py"]


def test_a_repeated_warning_shows_once() -> None:
    """Under Python's default filter the same line warns once, in however many traces."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(3):
            caught_warning_again.emit()
    assert len(caught) == 1


caught_warning_again = BlockWarning("builtins", "UserWarning", "again", "f.py", 3)


def test_a_long_message_is_cut() -> None:
    """An error is read by people: no more of it travels than they would read, and it says so."""
    text = "x" * (3 * TEXT_LIMIT)
    error = BlockError.of(ValueError(text, 7), f"Traceback\nValueError: {text}")
    assert error.message.startswith("('xxx")
    for part in (error.message, error.traceback, error.args[0]):
        assert len(part) < TEXT_LIMIT + 100
        assert "midstream: cut, there were 3000" in part
    assert error.args[1] == 7
    rebuilt = error.rebuild()
    assert isinstance(rebuilt, ValueError)
    assert BlockError.of(ValueError("x" * TEXT_LIMIT), "").message == "x" * TEXT_LIMIT
