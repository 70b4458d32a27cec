"""The grammar of blocks: statements that can be written in every dialect."""

from __future__ import annotations

from dataclasses import dataclass

from tests.fuzz.dialects import Dialect, Lines, indented
from tests.fuzz.sites import Site


class Statement:
    """A statement of a block."""

    order = 0
    """Where in the forward it first wants something; 0 if it wants nothing."""

    def lines(self, say: Dialect) -> Lines:
        """Its source."""
        raise NotImplementedError


@dataclass(frozen=True)
class Text(Statement):
    """Python that wants nothing of the forward."""

    text: str

    def lines(self, say: Dialect) -> Lines:
        return self.text.splitlines()


@dataclass(frozen=True)
class At(Statement):
    """Python around a tensor at a site; ``@`` stands for the tensor, ``@@`` for the whole value."""

    site: Site
    leaf: str
    text: str

    @property
    def order(self) -> int:  # type: ignore[override]
        return self.site.order

    def lines(self, say: Dialect) -> Lines:
        read = say.read(self.site.path, self.site.side)
        return self.text.replace("@@", read).replace("@", read + self.leaf).splitlines()


@dataclass(frozen=True)
class Put(Statement):
    """A value assigned to a site, or for a site's module to be skipped."""

    site: Site
    value: str
    skips: bool = False

    @property
    def order(self) -> int:  # type: ignore[override]
        return self.site.order

    def lines(self, say: Dialect) -> Lines:
        read = say.read(self.site.path, self.site.side)
        value = self.value.replace("@", read)
        if self.skips:
            return [say.skip(self.site.path, value)]
        return [say.write(self.site.path, self.site.side, value)]


@dataclass(frozen=True)
class Save(Statement):
    """A variable that is kept."""

    name: str
    value: str

    def lines(self, say: Dialect) -> Lines:
        return [say.save(self.name, self.value)]


@dataclass(frozen=True)
class Calls(Statement):
    """A module called on a value of the block."""

    path: str
    target: str
    value: str

    def lines(self, say: Dialect) -> Lines:
        return [f"{self.target} = {say.call(self.path, self.value)}"]


@dataclass(frozen=True)
class Stops(Statement):
    """The request's end."""

    def lines(self, say: Dialect) -> Lines:
        return [say.stop()]


@dataclass(frozen=True)
class Nested(Statement):
    """A compound statement: its head, its body, and what follows the body."""

    head: str
    body: tuple[Statement, ...]
    tail: tuple[str, ...] = ()

    @property
    def order(self) -> int:  # type: ignore[override]
        return first_order(self.body)

    def lines(self, say: Dialect) -> Lines:
        return [*self.head.splitlines(), *indented(render(self.body, say)), *self.tail]


@dataclass(frozen=True)
class OverSteps(Statement):
    """A loop over steps of the request."""

    which: str
    body: tuple[Statement, ...]

    def lines(self, say: Dialect) -> Lines:
        return say.steps(self.which, render(self.body, say))


def first_order(body: tuple[Statement, ...]) -> int:
    """Where the first statement of a body that wants something is."""
    return next((s.order for s in body if s.order), 0)


def render(body: tuple[Statement, ...], say: Dialect) -> Lines:
    """The source of statements one after another."""
    return [line for statement in body for line in statement.lines(say)]


def forward_order(body: tuple[Statement, ...]) -> tuple[Statement, ...]:
    """Statements sorted as the forward reaches their places; the others stay behind theirs."""
    keyed, last = [], 0
    for statement in body:
        last = statement.order or last
        keyed.append((last, statement))
    return tuple(statement for _, statement in sorted(keyed, key=lambda pair: pair[0]))
