"""Blocks of a grammar on the tiny engine give what hooks on a plain model give."""

from __future__ import annotations

from typing import Any

from hypothesis import assume, given, note
from hypothesis import strategies as st

from tests.fuzz.counting import examples
from tests.fuzz.engine_runs import Request, compare, predicted, source, trace
from tests.fuzz.llama_sites import LLAMA
from tests.fuzz.strategies import EDITS, Blocks
from tests.modeling.vllm.conftest import live

_CALLS = ["model.layers.1.mlp", "model.layers.2.mlp"]
_SKIPS = [
    s for s in LLAMA if s.side == "output" and s.path.endswith(("mlp", "self_attn", "layers.2"))
]
_EDITS = [text for text in EDITS if ">" not in text]  # the last bits would decide
_places = st.lists(st.sampled_from(LLAMA), min_size=1, max_size=6, unique=True)
_prompts = st.sampled_from([3, 1, 9, 20]).map(
    lambda n: tuple((7 * n + 5 * i) % 90 + 5 for i in range(n))
)


@st.composite
def requests(draw: st.DrawFn, count: int) -> list[Request]:
    """So many requests of one to four steps, whose blocks meet at a few places."""
    few = draw(_places)
    blocks = Blocks(
        draw(st.sampled_from([few, few, LLAMA])), _CALLS, _EDITS, [s for s in _SKIPS if s in few]
    )
    found = []
    for _ in range(count):
        steps = draw(st.sampled_from([1, 4, 4]))
        found.append(Request(draw(_prompts), steps, draw(blocks.block(steps))))
    return found


traces = st.one_of(
    st.tuples(st.just("with"), requests(1)),
    st.tuples(st.just("function"), requests(1)),
    st.tuples(st.just("invokes"), st.integers(1, 3).flatmap(requests)),
)


def check(model: Any, hf: Any, form: str, some: list[Request]) -> None:
    """Compare what a trace of the requests gives with what each must give."""
    note("\n".join(source(some, form)))
    right = [predicted(hf, request, i) for i, request in enumerate(some)]
    assume(not any(outcome.close_call for outcome in right))
    found = compare(trace(model, some, form), right)
    assert found is None, found
    assert live(model) == [0]


def test_blocks_on_the_engine(llama: Any, hf: Any) -> None:
    """Saved values, errors and tokens are those of hooks, however many requests a trace has."""

    @examples(0.4)
    @given(traces)
    def blocks(drawn: tuple[str, list[Request]]) -> None:
        check(llama, hf.model, *drawn)

    blocks()
