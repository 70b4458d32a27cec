"""A backward statement in a block: what its body's `.grad` goes through."""

from __future__ import annotations

import textwrap
import traceback
import types
import warnings

import pytest
import torch

from midstream.errors import UnboundSaveWarning
from midstream.tracing import Block, Execution
from midstream.tracing.backward import BACKWARD, GRAD, HELPER_NAMES
from midstream.tracing.block import Code

from .helpers import load


class Box:
    """What the recording helper gives in a value's place."""

    def __init__(self, log, name):
        self.__dict__.update(log=log, name=name)

    def __getattr__(self, attribute):
        self.log.append(("get", self.name, attribute))
        return [self.name]

    def __setattr__(self, attribute, value):
        self.log.append(("set", self.name, attribute, value))

    def __delattr__(self, attribute):
        self.log.append(("del", self.name, attribute))


class Context:
    def __init__(self, log, name):
        self.log, self.name = log, name

    def __enter__(self):
        self.log.append(("enter", self.name))
        return self.name

    def __exit__(self, *_):
        self.log.append(("exit", self.name))


class Value:
    """Has a name, and a `.grad` that no helper was asked for."""

    def __init__(self, name):
        self.name, self.grad = name, "plain"


def code(source, **fields):
    """A block with `source` as its body, in a file where it begins in line 5."""
    return Code(textwrap.indent(source, "    "), "block.py", 5, **fields)


def run(source, **values):
    """Run a block with helpers that record; return the record and the names it bound."""
    log = []

    def backward(subject, *args, **kwargs):
        log.append(("backward", subject.name, args, kwargs))
        return Context(log, subject.name)

    names = {name: Value(name) for name in ("x", "y", "z", "loss")}
    block = Block(code=code(source), values={**names, **values})
    helpers = {BACKWARD: backward, GRAD: lambda subject: Box(log, subject.name)}
    execution = Execution(block, helpers=helpers)
    execution.run()
    return log, execution


ENTER = [("backward", "loss", (), {}), ("enter", "loss")]
EXIT = [("exit", "loss")]


@pytest.mark.parametrize(
    ("body", "log"),
    [
        ("g = x.grad", [("get", "x", "grad")]),
        ("x.grad = 1", [("set", "x", "grad", 1)]),
        ("x.grad: int = 1", [("set", "x", "grad", 1)]),
        ("x.grad += [1]", [("get", "x", "grad"), ("set", "x", "grad", ["x", 1])]),
        ("x.grad[0] = 1", [("get", "x", "grad")]),
        ("del x.grad", [("del", "x", "grad")]),
        ("for x.grad in [1]: pass", [("set", "x", "grad", 1)]),
        ("def f(): return x.grad\nf()", [("get", "x", "grad")]),
        ("(lambda: x.grad)()", [("get", "x", "grad")]),
        ("class A:\n    g = x.grad", [("get", "x", "grad")]),
        ("g = [t.grad for t in (x, y)]", [("get", "x", "grad"), ("get", "y", "grad")]),
        ("if True:\n    while True:\n        x.grad\n        break", [("get", "x", "grad")]),
        ("try:\n    x.grad\nfinally:\n    y.grad", [("get", "x", "grad"), ("get", "y", "grad")]),
        ("match 'plain':\n    case y.grad if x.grad: z.grad", [("get", n, "grad") for n in "xz"]),
        ("x.name", []),
        ("grad = 1", []),
    ],
)
def test_every_grad_of_the_body_goes_through(body, log):
    """Reads, writes and deletes alike, in whatever the body holds (H22)."""
    source = "with loss.backward():\n" + "".join(f"    {x}\n" for x in body.split("\n"))
    assert run(source)[0] == ENTER + log + EXIT


@pytest.mark.parametrize(
    ("source", "log"),
    [
        ("loss.backward = list\nloss.backward()\nx.grad", []),
        ("with loss.backward():\n    pass\nx.grad", ENTER + EXIT),
        ("def f():\n    with loss.backward():\n        pass\n    x.grad\nf()", ENTER + EXIT),
        ("with context(x.grad):\n    x.grad", []),
        ("b = loss.backward\nwith b():\n    x.grad", []),
    ],
)
def test_only_the_body_of_a_backward_statement(source, log):
    """A plain call of `backward`, and `.grad` outside a body, stay what they are (H22)."""
    log_of_others = []
    context = lambda value: Context(log_of_others, value)  # noqa: E731
    loss = Value("loss")
    loss.backward = lambda: Context(log_of_others, "plain")
    assert run(source, context=context, loss=loss)[0] == log


def test_arguments_arrive_and_the_value_is_bound():
    """All forms of arguments, and the `as` name, which is what the helper's context gives (H22)."""
    source = "with loss.backward(1, *[2], retain_graph=True, **{'k': 3}) as name:\n    pass\n"
    log, execution = run(source)
    assert log[0] == ("backward", "loss", (1, 2), {"retain_graph": True, "k": 3})
    assert execution.namespace["name"] == "loss"


def test_items_of_one_statement():
    """Any item may be the call; those behind it are inside, those before it are not."""
    log = []

    def context(value):
        log.append(value)
        return Context(log, "other")

    source = "with context(x.grad), loss.backward(), context(x.grad):\n    y.grad\n"
    recorded, _ = run(source, context=context)
    assert recorded == [*ENTER, ("get", "x", "grad"), ("get", "y", "grad"), *EXIT]
    assert log[0] == "plain"
    assert log[2] == ["x"]


def test_statements_inside_each_other():
    """The inner one's subject is part of the outer body (H22)."""
    source = "with loss.backward():\n    with f(x.grad).backward():\n        y.grad\n    z.grad\n"
    log, _ = run(source, f=lambda got: Value(f"f({got})"))
    assert [entry[:2] for entry in log] == [
        ("backward", "loss"),
        ("enter", "loss"),
        ("get", "x"),
        ("backward", "f(['x'])"),
        ("enter", "f(['x'])"),
        ("get", "y"),
        ("exit", "f(['x'])"),
        ("get", "z"),
        ("exit", "loss"),
    ]


def test_saves_in_the_body():
    """`x.grad.save()` is a save under the name that it is bound to; helpers are no names (H22)."""
    _, execution = run("with loss.backward():\n    g = x.grad.save()\n    y.grad.save()\n")
    assert execution.saves() == {"g": ["x"]}
    assert set(HELPER_NAMES).isdisjoint(execution.saves())


def test_a_bare_save_in_the_body_warns(tmp_path):
    """Only the save whose value is bound to no name, at its line."""
    text = """
        def f(loss=None, x=None):
            with Trace(run=False):
                with loss.backward():
                    g = x.grad.save()
                    x.grad.save()
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        load(tmp_path / "bare_gradient.py", text).f()
    assert [(w.category, w.lineno) for w in caught] == [(UnboundSaveWarning, 6)]


def test_outside_names_are_those_of_the_source():
    """What is read is what the source reads, and a name that a helper is given is read whole."""
    compiled = code("with loss.backward():\n    g = x.grad + y.data\n").compiled()
    assert compiled.reads == {"loss", "x", "y"}
    assert dict(compiled.attributes) == {"y": frozenset({"data"})}


def test_such_a_block_is_not_plain():
    """It runs autograd, which changes modes: not code that only computes."""
    assert code("g = x.grad").compiled().plain
    assert not code("with loss.backward():\n    g = x.grad\n").compiled().plain


def test_private_names_and_decorators():
    """Names of an enclosing class keep their spelling, and a decorator is part of the body."""
    source = "with loss.backward():\n    @x.grad\n    def f(): pass\n    self.__t.grad\n"
    log, calls = [], []
    holder = types.SimpleNamespace(_A__t=Value("t"))

    def grad(subject):
        log.append(subject.name)
        return types.SimpleNamespace(grad=calls.append)

    values = {"loss": Value("loss"), "x": Value("x"), "self": holder}
    helpers = {BACKWARD: lambda subject: Context([], ""), GRAD: grad}
    Execution(Block(code=code(source, class_name="A"), values=values), helpers=helpers).run()
    assert log == ["x", "t"]
    assert len(calls) == 1


def test_errors_have_the_users_line_and_columns():
    """A helper that raises is shown at the `.grad` of the file, with its columns (H22)."""

    def refuse(subject):
        raise KeyError(subject.name)

    source = "with loss.backward():\n    a = 1\n    g = (1, x.grad)\n"
    block = Block(code=code(source), values={"loss": Value("loss"), "x": Value("x")})
    helpers = {BACKWARD: lambda subject: Context([], ""), GRAD: refuse}
    with pytest.raises(KeyError) as error:
        Execution(block, helpers=helpers).run()
    frames = traceback.extract_tb(error.value.__traceback__)
    frame = next(frame for frame in frames if frame.filename == "block.py")
    assert (frame.lineno, frame.colno, frame.end_colno) == (7, 16, 17)


def test_without_helpers_the_source_is_what_happens():
    """PyTorch's `backward` is called, which is no context: Python's error, at the line."""
    x = torch.ones(2, requires_grad=True)
    block = Block(code=code("with loss.backward():\n    pass\n"), values={"loss": x.sum()})
    with pytest.raises(TypeError, match="context manager"):
        Execution(block).run()
    assert torch.equal(x.grad, torch.ones(2))
    own = Value("loss")
    own.backward = lambda: Context([], "own")
    values = {"loss": own, "x": Value("x")}
    execution = Execution(
        Block(code=code("with loss.backward() as c:\n    g = x.grad\n"), values=values)
    )
    execution.run()
    assert (execution.namespace["c"], execution.namespace["g"]) == ("own", "plain")
