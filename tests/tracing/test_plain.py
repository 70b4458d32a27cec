"""Which code is seen to do nothing but compute on what it is given."""

from __future__ import annotations

import ast
import textwrap

import pytest

from midstream.tracing.plain import is_plain


def found(source: str) -> bool:
    """Whether a source is recognised."""
    return is_plain(ast.parse(textwrap.dedent(source)))


def test_reads_writes_and_arithmetic_are_plain() -> None:
    """Loops over steps, reads, edits, replacements and PyTorch's common functions are plain."""
    assert found(
        """
        rows = [].save()
        for step in tracer.iter[:3]:
            hidden = model.model.layers[step].output[0]
            if float(hidden.norm()) > 1:
                hidden[:] *= 2
            model.model.norm.output = torch.where(hidden > 0, hidden, 0)
            rows.append(hidden.softmax(dim=-1).topk(k=3))
        """
    )


@pytest.mark.parametrize(
    "source",
    [
        "print(x)",
        "mine(x)",
        "torch.manual_seed(3)",
        "x.normal_()",
        "x.requires_grad_()",
        "with torch.enable_grad():\n    x",
        "import random",
        "y = lambda: x",
        "y = [z for z in x]",
        "x.grad = None",
        "x.__class__",
        "max = torch.manual_seed\nmax(3)",
        "[torch.rand][0](3)",
    ],
)
def test_what_may_do_more_is_not(source: str) -> None:
    """Functions of others, random numbers, modes, prints and new functions make code ordinary."""
    assert not found(source)


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
    assert not found(call)
    assert found("max(x, default=0)")
