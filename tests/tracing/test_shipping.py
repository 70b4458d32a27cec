"""Blocks as bytes, and back in this process and in another one."""

from __future__ import annotations

import sys
import threading

import cloudpickle
import msgspec
import pytest

from midstream.errors import DataVersionError, TransportError
from midstream.tracing import Block, Code, Execution, dumps, loads

from .helpers import Trace, load, python


def nobody(_):
    return None


def captured(**values):
    """Return a block whose values are the arguments."""
    return Block(code=Code("    pass\n", "f.py", 2), values=values)


def there_and_back(block):
    return loads(dumps(block, nobody), nobody)


def test_round_trip():
    """A block comes back equal, and runs."""
    with Trace(run=False) as trace:
        x = [sys.maxsize, {"a": (1, 2.0, None)}].save()
    again = there_and_back(trace.block)
    assert again.code == trace.block.code
    execution = Execution(again)
    execution.run()
    assert execution.saves() == {"x": [sys.maxsize, {"a": (1, 2.0, None)}]}


def test_values_are_fresh_at_every_load():
    """Two loads of the same bytes share no mutable value."""
    data = dumps(captured(x=[1]), nobody)
    first, second = loads(data, nobody), loads(data, nobody)
    first.values["x"].append(2)
    assert second.values == {"x": [1]}


def test_two_names_of_one_object_stay_one():
    """Identity between the values of a block is kept."""
    shared = [1]
    values = there_and_back(captured(a=shared, b={"in": shared}, c=shared)).values
    assert values["a"] is values["c"]
    assert values["b"]["in"] is values["a"]


def test_persistent_objects_do_not_travel():
    """Objects that the other side has go by name, wherever they occur (C12)."""
    model, tracer = threading.Lock(), threading.Lock()
    names = {id(model): "model", id(tracer): "tracer"}
    data = dumps(captured(m=model, nested=[{"t": tracer}]), lambda x: names.get(id(x)))
    values = loads(data, {"model": 1, "tracer": 2}.__getitem__).values
    assert values == {"m": 1, "nested": [{"t": 2}]}


def test_value_that_cannot_travel_is_named():
    """The error names the variable, its type and the reason, and is a TypeError (G52)."""
    with pytest.raises(
        TransportError, match=r"variable `gate` \(a _thread.lock\).*cannot pickle"
    ) as e:
        dumps(captured(fine=1, gate=threading.Lock()), nobody)
    assert isinstance(e.value, TypeError)
    assert isinstance(e.value.__cause__, TypeError)
    with pytest.raises(TransportError, match="variable `deep`"):
        dumps(captured(deep=[{"x": (i for i in ())}]), nobody)


def test_value_that_cannot_be_rebuilt_is_named():
    """A value that fails on the other side is named there (C95, G51)."""
    data = dumps(captured(good=1, bad=Unloadable()), nobody)
    with pytest.raises(TransportError, match=r"`bad` cannot be rebuilt.*LookupError: not here"):
        loads(data, nobody)


class Unloadable:
    """An object that can be pickled and not rebuilt."""

    def __reduce__(self):
        return _fail, ()


def _fail():
    raise LookupError("not here")


def test_other_versions_are_refused():
    """Bytes of another midstream or Python name both versions; other bytes are refused too."""
    data = msgspec.msgpack.decode(dumps(captured(), nobody))
    for key, value in (("python", "2.7"), ("midstream", "0.0.0")):
        with pytest.raises(DataVersionError, match=f"{value}.*here is midstream") as caught:
            loads(msgspec.msgpack.encode({**data, key: value}), nobody)
        assert isinstance(caught.value, ValueError)
    with pytest.raises(DataVersionError, match="no block of midstream"):
        loads(b"\x00\x01", nobody)
    with pytest.raises(DataVersionError, match="no block of midstream"):
        loads(msgspec.msgpack.encode({**data, "code": 3}), nobody)


RUNNER = """
import sys
from midstream.tracing import Execution, loads
execution = Execution(loads(bytes.fromhex(sys.stdin.read()), None), "model", "tracer")
execution.run()
print(execution.saves(), "torch" in sys.modules)
"""


def run_elsewhere(block):
    """Run a block in a process that can import nothing of the tests."""
    done = python("-c", RUNNER, stdin=dumps(block, nobody).hex())
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_users_functions_and_classes_travel_by_value(tmp_path):
    """Functions and classes of the user's modules run where those cannot be imported (C12)."""
    helper = load(
        tmp_path / "users_helper.py",
        """
        import json
        FACTOR = 3
        def scale(x): return x * FACTOR
        class Pair:
            def __init__(self, a): self.a = scale(a)
            def text(self): return json.dumps(self.a)
        """,
    )
    module = load(
        tmp_path / "users_module.py",
        """
        import users_helper
        from users_helper import Pair, scale
        lock = __import__("threading").Lock()
        def local(x): return scale(x) + 1
        def f():
            pair = Pair(2)
            with Trace(run=False) as trace:
                out = [local(1), scale(2), pair.text(), type(pair) is Pair].save()
                more = [users_helper.scale(3), users_helper.FACTOR].save()
            return trace.block
        """,
    )
    assert helper.scale(1) == 3
    result = run_elsewhere(module.f())
    assert result == "{'out': [4, 6, '6', True], 'more': [9, 3]} False"
    assert not {"users_helper", "users_module"} & cloudpickle.list_registry_pickle_by_value()


def test_functions_keep_their_file():
    """A function that travels by value raises with its own file, that of inner functions too."""

    def outer():
        return lambda: 1

    again = there_and_back(captured(outer=outer)).values["outer"]
    assert again is not outer
    assert again.__code__.co_filename == again().__code__.co_filename == __file__


def test_installed_code_travels_by_name():
    """What is installed goes by reference and is the same object after a load (C14)."""
    values = there_and_back(captured(f=msgspec.json.encode, t=threading.Thread, m=msgspec)).values
    assert values == {"f": msgspec.json.encode, "t": threading.Thread, "m": msgspec}
    values = there_and_back(captured(own=dumps, kind=Block)).values
    assert values == {"own": dumps, "kind": Block}


def test_function_form_travels(tmp_path):
    """A function travels by value, and its text goes with it."""
    module = load(
        tmp_path / "function_form.py",
        """
        from midstream.tracing import save
        def fn(model, tracer):
            x = save([model, tracer])
        """,
    )
    block = Block(function=module.fn)
    assert run_elsewhere(block) == "{'x': ['model', 'tracer']} False"
    assert there_and_back(block).listing.source.startswith("def fn(")


def test_code_is_data():
    """The code in the bytes is its text, and no pickle (C12)."""
    block = Block(code=Code("    marker_in_source = 1\n", "f.py", 2))
    envelope = msgspec.msgpack.decode(dumps(block, nobody))
    assert envelope["code"]["source"] == "    marker_in_source = 1\n"
    assert envelope["payload"] == b""


def test_threads_may_dump_at_once(tmp_path):
    """Dumps in threads do not take each other's registrations away."""
    module = load(tmp_path / "threaded_helper.py", "def scale(x):\n    return x * 3\n")
    failures = []

    def work():
        for _ in range(20):
            data = dumps(captured(f=module.scale), nobody)
            if b"threaded_helper" in data and loads(data, nobody).values["f"] is module.scale:
                failures.append("by name")

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
