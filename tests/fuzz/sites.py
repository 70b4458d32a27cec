"""Where blocks read and write: places of a model with what is served there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["rows", "numbers", "shared"]
Leaves = tuple[tuple[str, Kind], ...]


@dataclass(frozen=True)
class Site:
    """A side of a module, and the tensors in the value served there.

    Attributes:
        path, side: as in ``hooked.Read``.
        leaves: selectors of its tensors ("[0]", "['a']", "" for a bare tensor), with their kind.
        whole: text of a value with the served structure, ``{0}`` for its first tensor.
        order: where in the forward it is.
    """

    path: str
    side: str
    leaves: Leaves = (("", "rows"),)
    whole: str = "{0}"
    order: int = 0

    def __repr__(self) -> str:
        return f"{self.path}.{self.side}"

    @property
    def rows(self) -> list[str]:
        """Selectors of the tensors that have a row per token."""
        return [leaf for leaf, kind in self.leaves if kind == "rows"]


PAIR: Leaves = (("[0]", "rows"), ("[1]", "rows"))
INPUT: Leaves = (("[0][0]", "rows"),)


def in_order(sites: list[Site]) -> list[Site]:
    """Sites that know their place in the list."""
    return [Site(s.path, s.side, s.leaves, s.whole, i) for i, s in enumerate(sites, 1)]


def _toy_layer(i: int) -> list[Site]:
    path = f"layers.{i}"
    residual: Leaves = (
        ("[0][0]", "numbers"),
        ("[1]['hidden']", "rows"),
        *((("[1]['residual']", "rows"),) if i else ()),
    )
    both: Leaves = (("[0][0]", "rows"), *((("[0][1]", "rows"),) if i else ()))
    return [
        Site(
            path,
            "inputs",
            residual,
            "(({0},), {{'hidden': {1}, 'residual': " + ("{1}" if i else "None") + "}})",
        ),
        Site(path, "input", (("", "numbers"),)),
        Site(f"{path}.norm", "inputs", both, "(({0}, " + ("{1}" if i else "None") + "), {{}})"),
        Site(f"{path}.norm", "output", PAIR, "({0}, {1})"),
        Site(
            f"{path}.mix",
            "output",
            (("['a']", "rows"), ("['b'][0]", "rows")),
            "{{'a': {0}, 'b': [{1}]}}",
        ),
        Site(f"{path}.mix.lin", "output", (("[:, :4]", "rows"),), "torch.cat([{0}, {0}], 1)"),
        Site(f"{path}.source.self_mlp_0", "input"),
        Site(f"{path}.mlp", "input"),
        Site(f"{path}.mlp", "inputs", INPUT, "(({0},), {{}})"),
        Site(f"{path}.mlp", "output"),
        Site(f"{path}.source.self_mlp_0", "output"),
        *([] if i else [Site("layers.0.act", "output")]),  # of its two calls, the first is served
        Site(f"{path}.gate", "input"),
        Site(f"{path}.gate", "output"),
        Site(f"{path}.source.self_gate_0", "output"),
        Site(f"{path}.twins", "output", ((".low", "rows"), (".high", "rows")), "({0}, {1})"),
        Site(path, "output", PAIR, "({0}, {1})"),
    ]


TOY = in_order(
    [
        Site("", "inputs", (("[0][0]", "rows"), ("[0][1]", "numbers")), "(({0}, {1}), {{}})"),
        Site("", "input"),
        Site("embed", "input"),
        Site("embed", "output"),
        Site("source.self_embed_0", "output"),
        *_toy_layer(0),
        *_toy_layer(1),
        Site("table", "input"),
        Site("table", "output", (("[0]", "rows"), ("[1]", "shared")), "({0}, torch.zeros(50), 3)"),
        Site("unused", "output"),
        Site("", "output"),
    ]
)
"""Places of ``toy.Toy``."""
