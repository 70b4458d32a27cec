"""Blocks of a grammar beside a toy model give what plain PyTorch hooks give."""

from __future__ import annotations

from hypothesis import given, note
from hypothesis import strategies as st

from tests.fuzz.counting import examples
from tests.fuzz.dialects import Midstream
from tests.fuzz.grammar import render
from tests.fuzz.programs import difference
from tests.fuzz.sites import TOY
from tests.fuzz.strategies import Blocks
from tests.fuzz.toy_runs import Playing, Request, close, predicted

_SKIPS = [s for s in TOY if s.side == "output" and s.path.endswith(("mlp", "gate", "norm", "mix"))]
_CALLS = ["embed", "layers.1.mlp", "layers.0.act"]
_places = st.lists(st.sampled_from(TOY), min_size=1, max_size=5, unique=True)


@st.composite
def requests(draw: st.DrawFn) -> list[Request]:
    """One to three requests; some plain, some of several steps."""
    found = []
    few = draw(_places)  # the blocks of an example meet at a few places
    skips = [s for s in _SKIPS if s in few]
    blocks = Blocks(draw(st.sampled_from([few, few, TOY])), _CALLS, skips=skips)
    for _ in range(draw(st.integers(1, 3))):
        steps = draw(st.sampled_from([1, 1, 3]))
        body = None if draw(st.integers(0, 5)) == 5 else draw(blocks.block(steps))
        found.append(Request(draw(st.integers(1, 4)), steps, body))
    return found


def check(some: list[Request], learned: bool) -> None:
    """Compare what the requests give together with what each must give."""
    for index, request in enumerate(some):
        if request.body is not None:
            note("\n".join([f"request {index}: {request.rows} rows, {request.steps} steps"]))
            note("\n".join(render(request.body, Midstream("{0} = {1}"))))
    got = Playing(some, learned=learned).play()
    for index, request in enumerate(some):
        found = difference(got[index], predicted(request, index), close)
        assert found is None, f"request {index}: {found}"


@examples(0.6)
@given(requests(), st.booleans())
def test_blocks_on_a_toy(some: list[Request], learned: bool) -> None:
    """Saved values, errors and the model's outputs are those of hooks, whoever runs beside."""
    check(some, learned)
