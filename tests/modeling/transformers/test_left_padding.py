"""Generation for prompts of different lengths, with a block and without."""

from __future__ import annotations

import inspect

import torch

from midstream import TransformersModel

IDS = torch.tensor([[0, 0, 0, 5, 6, 7, 8], [9, 1, 2, 3, 4, 5, 6]])
MASK = (IDS != 0).long()


def model() -> TransformersModel:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    sizes = {"n_layer": 2, "n_embd": 32, "n_head": 2, "vocab_size": 200}
    words = {"bos_token_id": 0, "eos_token_id": None, "pad_token_id": 0}
    config = GPT2Config(**sizes, **words, initializer_range=0.3)  # spread out: tokens differ
    return TransformersModel(GPT2LMHeadModel(config).eval())


def test_a_block_leaves_generation_after_left_padding_as_it_is() -> None:
    """Positions are counted over real tokens, and the head runs on the last one, in a trace too."""
    traced, positions = model(), []
    with torch.no_grad():
        wanted = traced.module.generate(IDS, attention_mask=MASK, max_new_tokens=6)
    with traced.generate(IDS, attention_mask=MASK, max_new_tokens=6) as tracer:
        positions = [].save()
        for _ in tracer.iter[:2]:
            positions.append(traced.transformer.wpe.input)
            width = traced.lm_head.output.shape[1].save()
        found = tracer.result.save()
    assert torch.equal(found, wanted)
    assert [each.tolist() for each in positions] == [
        [[0, 0, 0, 0, 1, 2, 3], [0, 1, 2, 3, 4, 5, 6]],
        [[4], [7]],
    ]
    assert width == 1


def test_modules_show_their_own_parameters_beside_a_block() -> None:
    """Code of the model that asks what a module's forward takes is answered as without a trace."""
    traced = model()
    block = traced.module.transformer.h[0]
    before = [inspect.signature(module.forward) for module in (traced.module, block)]
    with traced.trace(IDS):
        traced.transformer.h[0].ln_1.output
        during = [
            inspect.signature(module.forward)
            for module in (traced.module, traced.module.transformer.h[0])
        ].save()
    assert during == before
