"""Hypothesis strategies for blocks."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import strategies as st

from tests.fuzz.grammar import (
    At,
    Calls,
    Nested,
    OverSteps,
    Put,
    Save,
    Statement,
    Stops,
    Text,
    forward_order,
)
from tests.fuzz.sites import Site

Body = tuple[Statement, ...]
Drawn = st.SearchStrategy[Statement]

VARIABLES = ("r0", "r1", "r2")
_variable = st.sampled_from(VARIABLES)
_factor = st.sampled_from(["0.5", "-1.0", "2.0", "0.0"])

READS = (
    "{v} = @",  # kept without a clone
    "{v} = @",
    "{v} = @.clone()",
    "{v} = @ * {c}",
    "{v} = @ + @.flip(0)",
    "t = @\n{v} = t if t is @ else None",
    "{v} = @.to(torch.float32).double()",
    "{v} = @[-1:]",
)
EDITS = (
    "@[:] = {e}",
    "@[:] *= {c}",
    "@[0] += {c}",
    "@[-1] = {e}[0]",
    "@[:, [0, 2]] = {c}",
    "@[1:] += 1.0",
    "@.mul_({c})",
    "@.add_({e})",
    "@.T[1] = {c}",
    "@.data[:] *= {c}",
    "@.numpy()[:, 1] = {c}",
    "@[@ > 0.3] = {c}",
    "@.zero_()",
    "@.copy_({e})",
    "torch.mul(@, {c}, out=@)",
    "{v} = @\n{v} *= {c}",
    "{v} = @\n@[:] = {v}.flip(0)",
    "with torch.enable_grad():\n    @.mul_({c})",
    "{v} = @\n@[:1] *= {c}\n{v}[-1:] += 1.0",
)
VALUES = (
    "@{l} * {c}",
    "@{l} + 1.0",
    "torch.zeros_like(@{l})",
    "@{l}",
    "@{l}.flip(0)",
    "@{l}.float()",
    "@{l}.clone().requires_grad_()",
    "{e} + @{l}",
)
MISFITS = ("None", "torch.zeros(2, 3)", "(r0,)", "[r0, r1, r2, 5]", "'text'", "{{}}", "r0[:0]")
EXPRESSIONS = ("{v}", "{v} * {c}", "{v}.flip(0)", "torch.tanh({v})", "{v} + r0", "{v}[-1:]", "V")
PLAIN = ("{v} = {e}", "{v} *= {c}", "{v}[0] = {c}", "{v} += {e}", "t = {e}", "{v} = {v}.clone()")
ERRORS = ("raise KeyError('x')", "1 / 0", "r0[99]", "undefined", "V[:] = 0 / 0")
CONDITIONS = ("True", "False", "r0.shape[0] > 2", "float(r1.double().sum()) > 0.1234", "r2 is r0")
COMPOUND = (
    "for _ in range(0):",
    "for _ in range(2):",
    "with torch.no_grad():",
    "while True:",
)
CAUGHT = ("OutOfOrderError", "ValueError", "Exception", "(KeyError, RuntimeError)")


@st.composite
def filled(draw: st.DrawFn, templates: Sequence[str], leaf: str = "", one_row: bool = False) -> str:
    """A template with its variables drawn; with `one_row`, of expressions the last row."""
    text = draw(st.sampled_from(templates))
    expression = ""
    if "{e}" in text:
        expression = f"({draw(filled(EXPRESSIONS))})" + "[-1:]" * one_row
    return text.format(v=draw(_variable), c=draw(_factor), e=expression, l=leaf)


_KEPT = tuple(Save(f"last_{v}", v) for v in VARIABLES)


class Blocks:
    """Strategies over the sites of one model.

    Args:
        sites: where blocks read and write.
        calls: paths of modules that take and give rows.
        edits: templates of edits, if not all of them.
        skips: sites (outputs) of the modules that may be skipped.
        later: whether they are for steps after the first, which have one row: a value with the
            rows of the prompt would fit none of them.
    """

    def __init__(
        self,
        sites: Sequence[Site],
        calls: Sequence[str] = (),
        edits: Sequence[str] = EDITS,
        skips: Sequence[Site] = (),
        *,
        later: bool = False,
    ):
        self._sites = list(sites)
        self._writable = [s for s in sites if s.rows]
        self._calls, self._edits, self._skips = list(calls), edits, list(skips)
        self._one_row = later

    @st.composite
    @staticmethod
    def _at(
        draw: st.DrawFn,
        sites: Sequence[Site],
        templates: Sequence[str],
        only_rows: bool,
        one_row: bool,
    ) -> At:
        site = draw(st.sampled_from(sites))
        leaf = draw(st.sampled_from(site.rows if only_rows else [leaf for leaf, _ in site.leaves]))
        return At(site, leaf, draw(filled(templates, one_row=one_row)))

    @st.composite
    @staticmethod
    def _put(draw: st.DrawFn, sites: Sequence[Site], skips: bool, one_row: bool) -> Put:
        site = draw(st.sampled_from(sites))
        if draw(st.sampled_from((*[False] * 7, True))):
            return Put(site, draw(filled(MISFITS)), skips)
        if skips:
            parts = ["Z[-1:]", "Z[-1:] * 0.5"] if one_row else ["Z", "Z * 0.5"]
        else:
            leaves = (site.rows * 2)[:2]
            parts = [draw(filled(VALUES, leaf, one_row)) for leaf in leaves]
        return Put(site, site.whole.format(*parts), skips)

    def simple(self) -> Drawn:
        """Statements without a body."""
        found: list[Drawn] = [
            self._at(self._sites, READS, False, self._one_row),
            st.builds(Save, st.sampled_from([f"s{i}" for i in range(6)]), _variable),
            st.builds(Text, filled(PLAIN, one_row=self._one_row)),
        ]
        if self._writable:
            edits = self._at(self._writable, self._edits, True, self._one_row)
            found += [edits, edits, self._put(self._writable, False, self._one_row)]
        if self._calls:
            found.append(st.builds(Calls, st.sampled_from(self._calls), _variable, _variable))
        if self._skips:
            found.append(self._put(self._skips, True, self._one_row))
        return st.one_of(found)

    def rare(self) -> Drawn:
        """Statements that end the block."""
        shared = [s for s in self._sites if any(kind == "shared" for _, kind in s.leaves)]
        found: list[Drawn] = [st.builds(Text, st.sampled_from(ERRORS)), st.just(Stops())]
        if shared:
            found.append(
                st.builds(At, st.sampled_from(shared), st.just("[1]"), st.just("@[:] += 1.0"))
            )
        return st.one_of(found)

    def statement(self) -> Drawn:
        """Any statement."""
        simple = self.simple()
        return st.one_of(*[simple] * 4, self._compound(simple))

    def _compound(self, inner: Drawn) -> Drawn:
        body = st.lists(inner, min_size=1, max_size=3).map(lambda b: forward_order(tuple(b)))
        once = st.sampled_from(COMPOUND)
        return st.one_of(
            st.builds(Nested, st.sampled_from(CONDITIONS).map("if {}:".format), body),
            st.builds(_try, body, st.sampled_from(CAUGHT)),
            st.builds(_finally, body),
            st.builds(_compound, once, body),
        )

    def body(self, most: int = 8) -> st.SearchStrategy[Body]:
        """A block, or a part of one; most of them in the order of the forward."""
        sizes = st.sampled_from(range(1, most + 1))
        statements = sizes.flatmap(
            lambda size: st.lists(self.statement(), min_size=size, max_size=size).map(tuple)
        )
        ordered = statements.map(forward_order)
        usual = st.one_of(*[ordered] * 5, statements)
        ended = st.builds(_insert, usual, self.rare(), st.integers(0, most))
        return st.one_of(*[usual] * 5, ended)

    def block(self, steps: int = 1) -> st.SearchStrategy[Body]:
        """A whole block, for a request of some steps."""
        body = self.body().map(lambda found: (*found, *_KEPT))
        if steps == 1:
            return body
        which = st.sampled_from([":", "0:2", "1:3", "1", "2", "[0, 2]", ":9"])
        later = Blocks(self._sites, self._calls, self._edits, self._skips, later=True)
        loop = st.builds(OverSteps, which, later.body(5))
        looped = st.builds(lambda head, *rest: (*head, *rest, *_KEPT), self.body(3), loop, loop)
        return st.one_of(body, looped, loop.map(lambda one: (one, *_KEPT)))


def _insert(body: Body, one: Statement, place: int) -> Body:
    return (*body[:place], one, *body[place:])


def _try(body: Body, caught: str) -> Nested:
    tail = (f"except {caught} as error:", "    caught.append(type(error).__name__)")
    return Nested("try:", body, tail)


def _finally(body: Body) -> Nested:
    return Nested("try:", body, ("finally:", "    caught.append('finally')"))


def _compound(head: str, body: Body) -> Nested:
    return Nested(head, (*body, Text("break")) if head.startswith("while") else body)
