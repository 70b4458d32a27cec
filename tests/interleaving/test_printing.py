"""What blocks print and warn about is kept; the process's own streams are left alone."""

from __future__ import annotations

import contextlib
import io
import sys
import threading
import warnings
from collections.abc import Callable

import greenlet
import pytest

from midstream.interleaving.printing import PRINT_LIMIT, WARNING_LIMIT
from midstream.interleaving.run import Run


def wait() -> None:
    """Give control back, as a block does that waits for a location."""
    greenlet.getcurrent().parent.switch()


def run_of(block: Callable[[], None]) -> Run:
    """A block that has been started."""
    run = Run(block)
    run.resume()
    return run


def ended(block: Callable[[], None]) -> Run:
    """A block that has run to its end without an error."""
    run = run_of(block)
    assert run.done
    assert run.error is None
    return run


def text_of(run: Run) -> str:
    """All it printed."""
    return "".join(text for _, text in run.output.prints())


def test_prints_are_kept_in_order() -> None:
    """Text of both streams stays in the order in which it was written."""

    def block() -> None:
        print("one", 2)
        sys.stdout.write("three\n")
        print("four", file=sys.stderr, flush=True)
        print("five", end="")

    assert list(ended(block).output.prints()) == [
        ("stdout", "one 2\nthree\n"),
        ("stderr", "four\n"),
        ("stdout", "five"),
    ]


def test_streams_are_the_engines_while_a_block_waits(capsys: pytest.CaptureFixture[str]) -> None:
    """What the engine prints between two visits of a block is not the block's."""
    before = sys.stdout, sys.stderr

    def block() -> None:
        print("first")
        wait()
        print("second")

    run = run_of(block)
    assert (sys.stdout, sys.stderr) == before
    print("the engine's")
    run.resume()
    assert text_of(run) == "first\nsecond\n"
    assert capsys.readouterr().out == "the engine's\n"


def test_two_blocks_print_each_for_itself() -> None:
    """Blocks that take turns do not see each other's text."""

    def block(name: str) -> Callable[[], None]:
        def body() -> None:
            stream = sys.stdout
            print(name, 1)
            wait()
            print(name, 2, file=stream)

        return body

    first, second = run_of(block("a")), run_of(block("b"))
    first.resume()
    second.resume()
    assert (text_of(first), text_of(second)) == ("a 1\na 2\n", "b 1\nb 2\n")


def test_a_redirection_in_a_block_outlasts_a_wait_and_stays_in_it() -> None:
    """A block that waits under `redirect_stdout` finds it again, and nobody else does."""
    buffer = io.StringIO()
    before = sys.stdout

    def block() -> None:
        with contextlib.redirect_stdout(buffer):
            print("kept 1")
            wait()
            print("kept 2")
        print("home")

    run = run_of(block)
    assert sys.stdout is before
    run.resume()
    assert sys.stdout is before
    assert buffer.getvalue() == "kept 1\nkept 2\n"
    assert text_of(run) == "home\n"


def test_threads_of_a_block_print_where_the_engine_does(capsys: pytest.CaptureFixture[str]) -> None:
    """Another thread is not the block, also while the block executes."""

    def block() -> None:
        thread = threading.Thread(target=print, args=("from a thread",))
        thread.start()
        thread.join()

    assert text_of(ended(block)) == ""
    assert capsys.readouterr().out == "from a thread\n"


def test_a_kept_stream_leads_outside_after_the_block(capsys: pytest.CaptureFixture[str]) -> None:
    """What a block has left behind, such as a logging handler, does not print into a dead block."""
    kept = []
    run = ended(lambda: kept.append(sys.stdout))
    print("later", file=kept[0], flush=True)
    assert text_of(run) == ""
    assert capsys.readouterr().out == "later\n"


def test_a_block_that_prints_without_end_is_cut() -> None:
    """Of what is beyond the limit nothing is kept, and the output says so."""

    def block() -> None:
        for _ in range(40):
            print("x" * (PRINT_LIMIT // 16))

    printed = list(ended(block).output.prints())
    assert len(printed[0][1]) <= PRINT_LIMIT
    assert f"more than {PRINT_LIMIT} characters" in printed[-1][1]


def test_only_text_is_written() -> None:
    """Writing bytes is the block's error, as it is elsewhere."""
    run = run_of(lambda: sys.stdout.write(b"bytes"))  # type: ignore[arg-type, func-returns-value]
    assert isinstance(run.error, TypeError)


def test_warnings_are_kept_whatever_the_filters_say() -> None:
    """Filters of the engine's process decide nothing: the caller's will."""

    def block() -> None:
        for _ in range(2):
            warnings.warn("careful", DeprecationWarning, stacklevel=1)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run = ended(block)
    kept = run.output.notices()
    assert [(n.message, n.category, n.file) for n in kept] == [
        ("careful", DeprecationWarning, __file__)
    ] * 2


def test_a_stacklevel_that_leads_out_of_the_block_is_the_users_line() -> None:
    """There is nothing of the user's above the block."""
    for level in (3, 50):
        (notice,) = ended(lambda n=level: warnings.warn("up", stacklevel=n)).output.notices()  # type: ignore[misc]
        assert notice.file == __file__
        assert notice.line > 0


def test_filters_of_a_block_outlast_a_wait_and_stay_in_it() -> None:
    """`catch_warnings` works across a wait; the process's own hook and filters do not change."""
    recorded = []

    def block() -> None:
        with warnings.catch_warnings(record=True) as caught:
            warnings.warn("one", stacklevel=1)
            wait()
            warnings.warn("two", stacklevel=1)
        recorded.extend(str(warning.message) for warning in caught)
        warnings.simplefilter("ignore")
        warnings.warn("three", stacklevel=1)

    before = warnings.showwarning, warnings.filters, list(warnings.filters)
    with pytest.warns(UserWarning, match="the engine's"):
        run = run_of(block)
        warnings.warn("the engine's", stacklevel=1)
        run.resume()
    assert run.error is None
    assert recorded == ["one", "two"]
    assert run.output.notices() == []
    assert (warnings.showwarning, warnings.filters, list(warnings.filters)) == before


def test_a_block_that_warns_without_end_is_cut() -> None:
    """Warnings beyond the limit are counted."""

    def block() -> None:
        for number in range(WARNING_LIMIT + 7):
            warnings.warn(f"{number}" * 9000, stacklevel=1)

    kept = ended(block).output.notices()
    assert len(kept) == WARNING_LIMIT + 1
    assert max(len(notice.message) for notice in kept) == 10_000
    assert kept[-1].message.startswith("7 further warnings")


def test_warnings_of_other_threads_are_not_the_blocks() -> None:
    """Another thread is not the block, also while the block executes."""

    def warn() -> None:
        warnings.warn("from a thread", stacklevel=1)

    def block() -> None:
        thread = threading.Thread(target=warn)
        thread.start()
        thread.join()

    with pytest.warns(UserWarning, match="from a thread"):
        run = ended(block)
    assert run.output.notices() == []
