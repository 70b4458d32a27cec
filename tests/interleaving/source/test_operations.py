"""Operations are named by what they call or assign, in the order in which they run."""

from __future__ import annotations

import ast

import pytest

from midstream.interleaving.source.operations import Instrument


def names(text: str) -> list[str]:
    """Names of the operations of some statements."""
    instrument = Instrument()
    for statement in ast.parse(text).body:
        instrument.visit(statement)
    return [site.name for site in instrument.sites]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("self.act(x)", ["self_act_0"]),
        ("f(g(x))", ["g_0", "f_0"]),
        ("f(f(x))", ["f_0", "f_1"]),
        ("x = f(x)", ["f_0", "x_0"]),
        ("x = 1\nx(x)", ["x_0", "x_1"]),
        ("x: int = f()", ["f_0", "x_0"]),
        ("self.kept = x", ["self_kept_0"]),
        ("q, k = f(x)", ["f_0"]),
        ("q, k = f(x), g(x)", ["f_0", "q_0", "g_0", "k_0"]),
        ("q, *k = f(x), g(x)", ["f_0", "g_0"]),
        ("a = b = f(x)", ["f_0"]),
        ("x += f(y)", ["f_0"]),
        ("x[f(i)] = g(y)", ["g_0", "f_0"]),
        ("x.view(2).transpose(0, 1)", ["x_view_0", "transpose_0"]),
        ("self.layers[i](x)", ["self_layers_0"]),
        ("f(x)(y)", ["f_0", "call_0"]),
        ("super().forward(x)", ["forward_0"]),
        ("super(A, self).forward(x)", ["super_0", "forward_0"]),
        ("locals(), globals(), vars()", []),
        ("[f(x) for x in g(y)]", ["g_0", "f_0"]),
        ("{f(x): h(x) for x in g(y)}", ["g_0", "f_0", "h_0"]),
        ("sum(f(x) for x in g(y))", ["g_0", "sum_0"]),
        ("h(lambda x: f(x))", ["h_0"]),
        ("def inner():\n    f(x)\ninner()", ["inner_0"]),
        ("f(x) if g(x) else h(x)", ["g_0", "f_0", "h_0"]),
        ("with f(x) as y:\n    g(y)", ["f_0", "g_0"]),
    ],
)
def test_names(text: str, expected: list[str]) -> None:
    """A dotted path with underscores and a counter shared by calls and assignments (B4)."""
    assert names(text) == expected


def test_lines() -> None:
    """An operation stands on the line of its name, also in a chain of calls."""
    instrument = Instrument()
    for statement in ast.parse("y = (\n    x\n    .view(2)\n    .clone()\n)").body:
        instrument.visit(statement)
    assert [(s.name, s.line) for s in instrument.sites] == [
        ("x_view_0", 3),
        ("clone_0", 4),
        ("y_0", 1),
    ]
