"""Code that can be seen to do nothing but compute."""

from __future__ import annotations

import textwrap

import pytest

from midstream.tracing.block import Code

PLAIN = [
    "h = model.layers[3].output[0]",
    "rows = [].save()\nfor step in tracer.iter[:]:\n    rows.append(model.layers[3].output[0])",
    "model.layers[3].output[0][:] += vector * 2.0",
    "model.layers[3].output = model.layers[3].output",
    "x = torch.stack([model.layers[0].output[0], model.layers[1].output[0]]) if deep else None",
    "total = model.layers[i].output[0].float().mean()",
    "if int(model.samples[0]) % 2 == 0:\n    x = model.layers[0].output[0].clone()",
    "while len(rows) < 3:\n    rows.append(model.logits.argmax(-1))",
    "model.samples[:] = torch.full((1,), 7)",
    "tracer.stop()",
    "best = max(scores, 0)",
    "rows.append([layer.output[0] for layer in model.model.layers])",
    "x = sum(h.norm() for h in rows if h is not None)",
]
OTHER = [
    "print('x')",
    "x = torch.rand(3)",
    "x = torch.nn.functional.dropout(h, 0.5)",
    "torch.manual_seed(0)",
    "with torch.enable_grad():\n    pass",
    "import random",
    "from math import sqrt",
    "x = helper(h)",
    "x = model.lm_head(h)",
    "torch.set_default_dtype(torch.float64)",
    "x = h.requires_grad_()",
    "h.requires_grad = True",
    "x = sorted(rows, key=print)",
    "f = print\nf('x')",
    "sum = print\nsum('x')",
    "try:\n    x = 1\nexcept Exception:\n    pass",
    "x = lambda: 0",
    "def f():\n    pass",
    "class A:\n    pass",
    "x = [print(i) for i in rows]",
    "x = f'{h}'",
    "global y",
    "del x",
    "raise ValueError",
    "assert x",
    "x = h.__class__",
    "x = h._version",
    "torch = other\nx = torch.zeros(3)",
    "x = h.numpy()",
    "model.config.update(1)",
    "x = (y := print)('x')",
    "x = [print][0]('x')",
]


def code(text: str) -> Code:
    """A block with that body."""
    return Code(textwrap.indent(text, "    ") + "\n", "a_file.py", 10)


@pytest.mark.parametrize("text", PLAIN)
def test_code_that_only_computes(text: str) -> None:
    """Reads, writes, arithmetic, loops and known functions and methods only compute."""
    assert code(text).compiled().plain


@pytest.mark.parametrize("text", OTHER)
def test_everything_else_may_do_anything(text: str) -> None:
    """Unknown calls, modes, random draws, prints, imports, definitions and hidden attributes."""
    try:
        compiled = code(text).compiled()
    except SyntaxError:
        pytest.fail(f"no block: {text}")
    assert not compiled.plain


@pytest.mark.parametrize(
    "call",
    [
        "max([1, 2], key=torch.manual_seed)",
        "min(x, key=y.normal_)",
        "x.sort(key=torch.set_default_dtype)",
        "max(x, **{'key': torch.manual_seed})",
    ],
)
def test_a_function_that_is_handed_over_may_do_more(call: str) -> None:
    """What a known function is given to call is not known."""
    assert not code(call).compiled().plain
    assert code("best = max(x, default=0)").compiled().plain
