"""Code and Block as data."""

from __future__ import annotations

import textwrap
import threading

import msgspec
import pytest

from midstream.errors import BlockSyntaxError
from midstream.tracing import Block, Code, Execution
from midstream.tracing.names import nested


def test_digest_covers_every_field():
    """Codes that differ anywhere have different digests; equal ones the same."""
    code = Code("    x = 1\n", "f.py", 3, "f", 0, None)
    changes = {"source": "    x = 2\n", "filename": "g.py", "first_line": 4, "name": "g"}
    changes |= {"flags": 1, "class_name": "C"}
    others = [msgspec.structs.replace(code, **{key: value}) for key, value in changes.items()]
    assert len({code.digest, *(other.digest for other in others)}) == 7
    assert Code("    x = 1\n", "f.py", 3, "f", 0, None).digest == code.digest


def test_code_survives_the_wire():
    """A Code decoded from its encoding is equal and shares the compiled form."""
    code = Code("    x = y\n", "f.py", 3)
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(code), type=Code)
    assert again == code
    assert again.compiled() is code.compiled()


def test_compiled_form_is_safe_in_threads():
    """Threads that compile one code at once get forms that run alike."""
    code = Code("    x = y + 1\n    x.save()\n", "f.py", 3)
    results = []

    def run():
        execution = Execution(Block(code=code, values={"y": 1}))
        execution.run()
        results.append(execution.saves())

    threads = [threading.Thread(target=run) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [{"x": 2}] * 8


def test_positions_are_the_files():
    """Instructions have the lines and columns of the file, also far down in it (C13)."""
    code = Code("        x = y\n", "f.py", 1000).compiled().code
    positions = [p for p in code.co_positions() if p[0] == 1000]
    assert (1000, 1000, 12, 13) in positions


def test_names_read():
    """Reads are what the block takes from outside before it has bound it on every path (C12)."""
    source = """
    a = 1
    b = a + c
    for i in d:
        e = i
    f(e)
    del a
    def g(x):
        return x + h + a
    try:
        j = k()
    except KeyError:
        pass
    m = j
    import os
    n = [os.path for o in b]
    global p
    p += 1
    class Q(R):
        s = t
    del u
    """.strip("\n")
    reads = Code(source, "f.py", 2).compiled().reads
    own = {"c", "d", "e", "f", "h", "a", "k", "j", "p", "R", "t", "u", "KeyError", "__name__"}
    assert reads == own


def test_private_names_everywhere():
    """Names are mangled as Python mangles them in the class, nested classes by their own."""
    source = """
    import __module
    from __package import __thing
    def __function(__argument, *, __keyword=1): return __argument
    __function(__a, __keyword=2)
    class Inner:
        __x = 1
    try:
        pass
    except E as __error:
        pass
    def g(): global __g; __g = 1
    __g = self.__b.__c__ + self.__secret
    match __a:
        case {"k": 1, **__rest} | [*__rest]:
            pass
    """.strip("\n")
    ours = Code(source, "f.py", 2, class_name="__Own").compiled().code
    method = f"class __Own:\n  def f():\n{textwrap.indent(source, ' ' * 4)}\n"
    pythons = compile(method, "f.py", "exec")
    of_class = {"f", "__Own"}
    assert "_Own__secret" in names_of(ours)
    assert names_of(ours) == names_of(pythons) - of_class


def names_of(code):
    """Return every name that a code object and those inside it use."""
    return {n for c in nested(code) for n in (*c.co_names, *c.co_varnames)}


def test_source_that_does_not_compile():
    """A source that is no block raises with its own line."""
    with pytest.raises(BlockSyntaxError) as caught:
        Code("    x = 1\n    return x\n", "f.py", 7).compiled()
    assert (caught.value.lineno, caught.value.filename) == (8, "f.py")


def test_block_has_one_form():
    """A block without code and function, or with both, is refused."""
    with pytest.raises(TypeError, match="exactly one"):
        Block()
    with pytest.raises(TypeError, match="exactly one"):
        Block(code=Code("", "f.py", 2), function=len)
    with pytest.raises(TypeError, match="block=3 is no function"):
        Block(function=3)


def test_lines_come_from_the_block():
    """A block knows the text of its own lines and of no others."""
    block = Block(code=Code("    x = 1\n    y = 2\n", "f.py", 5))
    lines = [block.line("f.py", n) for n in (4, 5, 6, 7)]
    assert lines == ["", "    x = 1", "    y = 2", ""]
    assert block.line("g.py", 5) == ""


def test_a_block_on_the_first_line() -> None:
    """A source that begins with the file keeps its lines."""
    code = Code("    a = 1\n    1 / 0\n", "<text>", 1)
    with pytest.raises(ZeroDivisionError) as raised:
        exec(code.compiled().code, {})
    assert raised.traceback[-1].lineno == 1  # which counts from 0
