"""Loops over steps that do one and the same edit in each."""

from __future__ import annotations

import textwrap

import pytest

from midstream.tracing.block import Code
from midstream.tracing.forms import Form, Gathering

LOOP = "for step in tracer.iter[:]:\n"
KNOWN = {
    "layer.output[0][:] += vector": Form("in place", "add", "vector", ("vector",), 0),
    "layer.output[0] [-1] -= 2 * vector": Form(
        "in place", "sub", "2 * vector", ("vector",), 0, True
    ),
    "layer.mlp.output *= 0.5": Form("in place", "mul", "0.5", (), None),
    "layer.mlp.output[...] /= scale": Form("in place", "div", "scale", ("scale",), None),
    "layer.output[-1].add_(vector)": Form("in place", "add", "vector", ("vector",), -1),
    "layers[3].output[0][:] = vector": Form("assigned", "", "vector", ("vector",), 0),
    "layer.output[0][:] = layer.output[0] + v": Form("assigned", "add", "v", ("v",), 0),
    "layer.output[0][-1] = layer.output[0][-1] * v": Form("assigned", "mul", "v", ("v",), 0, True),
    "h = mlp.output[0]\nh[-1] += v": Form("in place", "add", "v", ("v",), 0, True),
    "mlp.output = mlp.output + a * v": Form("replaced", "add", "a * v", ("a", "v"), None),
    "h = layer.output[0]\nh += vector": Form("in place", "add", "vector", ("vector",), 0),
    "h = layer.output[0]\nh[:] = h + vector": Form("assigned", "add", "vector", ("vector",), 0),
    "h = layer.output[0]\nh.copy_(vector)": Form("in place", "", "vector", ("vector",), 0),
}
READ = "__midstream_read__"
GATHERED = {
    "rows.append(layer.output)": f"{READ}(layer, None)",
    "rows.append(model.layers[3].output[0])": f"{READ}(model.layers[3], 0)",
    "rows.append((a.output[0], b.output[-1]))": f"({READ}(a, 0), {READ}(b, -1), )",
    "rows.append([x.output[0] for x in model.layers])": f"[{READ}(x, 0) for x in model.layers]",
    "rows.append([x.mlp.output for x in layers[2:]])": f"[{READ}(x.mlp, None) for x in layers[2:]]",
}
OTHER = [
    "rows.append(layer.output[0].float())",
    "rows.append(sum(layer.output))",
    "rows.append(step)",
    "rows.append(layers[step].output)",
    "rows.append([])",
    "rows.append([x.output for x in layers if x])",
    "rows.append([x.output for x in layers[k:]])",
    "rows.append(layer.output)\nother.append(layer.output)",
    "rows.extend(layer.output)",
    "self.rows.append(layer.output)",
    "rows.append(layer.input)",
    "rows.append(model.logits)",
    "layer.output[0][:] += vector * step",
    "layer.output[0][2:] += vector",
    "layer.output[0][:, 3] += 1",
    "layers[step].output[0][:] += vector",
    "layer.output[0][:] += vector.float()",
    "layer.output[0][:] += vectors[0]",
    "layer.output[0][:] **= vector",
    "layer.output[0][:] = vector - layer.output[0]",
    "layer.output[0][:] = other.output[0] + vector",
    "layer.input[:] += vector",
    "h = layer.output[0]\nh += h",
    "h = layer.output[0]\nother += vector",
    "h = layer.output[0]\nrows.append(h)",
    "h = layer.output[0]\nh += vector\nrows.append(h)",
    "layer.output[0][:] += vector\nvector = vector * 0.5",
    "vector += 1",
    "pass",
]


def form(source: str) -> Form | Gathering | None:
    """The form of a block."""
    indented = textwrap.indent(source, "    ")
    return Code(source=indented, filename="<block>", first_line=2, name="block").compiled().form


@pytest.mark.parametrize("body", KNOWN)
def test_an_edit_that_is_the_same_in_each_step(body: str) -> None:
    """One statement, or a name for the value and one, is recognised with its operand."""
    assert form(LOOP + textwrap.indent(body, "    ") + "\n") == KNOWN[body]


@pytest.mark.parametrize("body", GATHERED)
def test_reads_that_are_appended(body: str) -> None:
    """Outputs, and lists of them, that are appended to a list are recognised."""
    found = form(LOOP + textwrap.indent(body, "    ") + "\n")
    assert found == Gathering("rows", GATHERED[body])


@pytest.mark.parametrize("body", OTHER)
def test_what_may_differ_from_step_to_step(body: str) -> None:
    """A loop that does more, or what cannot be seen to be the same in each step, is left alone."""
    assert form(LOOP + textwrap.indent(body, "    ") + "\n") is None


@pytest.mark.parametrize(
    "source",
    [
        LOOP + "    h = layer.output[0]\n    h += v\nlast = h.save()\n",
        LOOP + "    layer.output[0][:] += v\nprint(step)\n",
        LOOP + "    rows.append(layer.output)\nprint(step)\n",
        "for seen[0] in tracer.iter[:]:\n    rows.append(layer.output)\n",
        "for seen[0] in tracer.iter[:]:\n    layer.output[0][:] += v\n",
        LOOP + "    layer.output[0][:] += v\nelse:\n    x = 1\n",
        LOOP + "    layer.output[0][:] += v\n" + LOOP + "    mlp.output[:] += v\n",
        "for step in tracer.iter[::2]:\n    layer.output[0][:] += v\n",
        "for step in tracer.iter[[1, 3]]:\n    layer.output[0][:] += v\n",
        "for step in range(3):\n    layer.output[0][:] += v\n",
        "if flag:\n    for step in tracer.iter[:]:\n        layer.output[0][:] += v\n",
    ],
)
def test_what_is_around_the_loop(source: str) -> None:
    """Names of the loop that are used behind it, a second loop and other loops are left alone."""
    assert form(source) is None


def test_code_before_and_behind() -> None:
    """What runs before the loop, and behind it without its names, does not matter."""
    source = "v = vector * 2\nfor _ in tracer.all():\n    layer.output[0][:] += v\nx = 1\n"
    assert form(source) == Form("in place", "add", "v", ("v",), 0)
