"""Linear attention, whose recurrent state is in no module's output, beside full attention."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from midstream import VLLM
from tests.conftest import TINY
from tests.support.checkpoints import LONG, A, B, checkpoint
from tests.support.groups import give_experts_a_group

GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}
PROMPT = LONG[:130]


@pytest.fixture(scope="module")
def hybrid() -> Iterator[Any]:
    """An engine on T-HYBRID with prefix caching; its kernels on a CPU take bfloat16 only."""
    give_experts_a_group()
    path = str(checkpoint("T-HYBRID", with_tokenizer=True))
    arguments = {**TINY, "dtype": "bfloat16", "enable_prefix_caching": True}
    with VLLM(path, dispatch=True, **arguments) as model:
        yield model


def reading(model: Any, tracer: Any) -> list[torch.Size]:
    """Read every layer in every step; gives the shapes of the first one's attention."""
    shapes = []
    for _ in tracer.all():
        shapes.append(model.model.layers[0].linear_attn.output.shape)
        for layer in model.model.layers:
            layer.output
    return shapes


def test_reading_changes_no_token(hybrid: Any) -> None:
    """Plain and traced, cached and not, the prompt goes on alike, and is traced whole.

    (O4, B33, C99, case 23).
    """
    tokens, cached, shapes = [], [], []
    for _ in range(2):
        (plain,) = hybrid.generate(PROMPT, max_tokens=6, **GREEDY)
        traced = hybrid.trace(PROMPT, block=reading, max_tokens=6, **GREEDY)
        tokens += [plain.outputs[0].token_ids, traced.result.outputs[0].token_ids]
        cached += [plain.num_cached_tokens, traced.result.num_cached_tokens]
        shapes.append(traced.saves["return"])
    assert tokens[1:] == tokens[:1] * 3
    assert cached[:2] == [0, 0]
    assert cached[2] > 0  # the plain prompt was cached, and the traced one did not read it
    assert cached[3] == 0
    assert shapes == [[(130, 128), *[(1, 128)] * 5]] * 2


def test_an_edit_stays_in_its_request(hybrid: Any) -> None:
    """A request whose linear attention is zeroed goes on differently, and its neighbour does not.

    (B33, C49).
    """
    alone = [
        list(output.outputs[0].token_ids)
        for output in hybrid.generate([A, B], max_tokens=6, **GREEDY)
    ]
    with hybrid.trace(max_tokens=6, **GREEDY) as tracer:
        with tracer.invoke(A):
            for _ in tracer.all():
                hybrid.model.layers[1].linear_attn.output[:] = 0
        with tracer.invoke(B):
            rows = len(hybrid.model.layers[1].linear_attn.output).save()
    edited, other = (list(output.outputs[0].token_ids) for output in tracer.result)
    assert edited != alone[0]
    assert other == alone[1]
    assert rows == len(B)
    again = hybrid.generate([A, B], max_tokens=6, **GREEDY)
    assert [list(output.outputs[0].token_ids) for output in again] == alone
