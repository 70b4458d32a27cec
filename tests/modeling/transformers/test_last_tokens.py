"""`model.logits` of rows whose last token is not at the last place."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from midstream import TransformersModel
from tests.support.checkpoints import A, B
from tests.support.compare import assert_close

Models = Callable[[str], TransformersModel]
TOLERANCE = 1e-5


def test_logits_of_rows_that_are_padded_on_the_right(traced: Models) -> None:
    """Each row's logits are those of its own last token, read, written and with gradients (H15)."""
    model = traced("T-BERT")
    right = [model.module(torch.tensor([ids])).logits[:, -1] for ids in (A, B)]
    for gradients in (True, False):
        with torch.set_grad_enabled(gradients), model.trace() as tracer:
            with tracer.invoke(A):
                logits = model.logits.clone().save()
                model.logits[:] = 1
            with tracer.invoke(B):
                logits = model.logits.clone().save()
                model.logits = model.logits * 2
        assert_close(logits, right, right[::-1], TOLERANCE)
        found = tracer.result.logits
        assert found[0, 4].unique().tolist() == [1]
        assert torch.equal(found[1:, 2], logits[1] * 2)
        assert not torch.allclose(found[1, 4], found[1, 2], atol=1e-2)
        assert found.requires_grad == gradients


def test_logits_of_decoder_tokens_of_other_lengths(traced: Models) -> None:
    """An encoder-decoder's invokes have the logits of their own last decoder token (H15, H19)."""
    model, short, long = traced("T-T5"), [[3, 5]], [[3, 5, 6, 7]]
    with model.trace() as tracer:
        with tracer.invoke(A, decoder_input_ids=short):
            stream = model.decoder.final_layer_norm.output
            logits = model.logits.save()
            with logits[0, 7].backward(retain_graph=True):
                gradient = stream.grad.save()
        with tracer.invoke(A, decoder_input_ids=long):
            logits = model.logits.save()
    source = torch.tensor([A])
    right = [
        model.module(input_ids=source, decoder_input_ids=torch.tensor(ids)).logits[:, -1]
        for ids in (short, long)
    ]
    assert_close(logits, right, right[::-1], TOLERANCE)
    assert gradient.any(-1).tolist() == [[False, True, False, False]]
    with model.trace([A, A], decoder_input_ids=[[3, 5, 0], [3, 5, 6]]) as tracer:
        whole = model.logits.save()
    assert torch.equal(whole, tracer.result.logits[:, -1])


@pytest.mark.parametrize("name", ["T-GPT2", "T-LLAMA", "T-BERT"])
def test_logits_of_a_users_own_padding(traced: Models, name: str) -> None:
    """An encoding that is padded on the right has its last real tokens' logits (H13, H15)."""
    model = traced(name)
    padded = {
        "input_ids": [[*B, 3, 3], A],
        "attention_mask": [[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]],
    }
    right = [model.module(torch.tensor([ids])).logits[:, -1] for ids in (B, A)]
    with model.trace(padded) as tracer:
        logits = model.logits.save()
    assert_close(logits, torch.cat(right), tracer.result.logits[:, -1], TOLERANCE)
    with model.trace() as tracer:
        with tracer.invoke(padded):
            logits = model.logits.save()
        with tracer.invoke([*A, 7]):
            logits = model.logits.save()
    assert_close(logits[0], torch.cat(right), torch.cat(right[::-1]), TOLERANCE)
    last = model.module(torch.tensor([[*A, 7]])).logits[:, -1]
    assert_close(logits[1], last, right[1], TOLERANCE)
