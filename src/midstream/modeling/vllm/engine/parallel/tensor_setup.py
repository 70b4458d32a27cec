"""Joins one worker to the other ranks of its engine, once its model is loaded."""

from __future__ import annotations

from typing import Any

import torch

from midstream.interleaving.interleaver import Interleaver
from midstream.interleaving.locations import Location
from midstream.modeling.vllm.engine.parallel.tensor import TensorRanks
from midstream.modeling.vllm.engine.parallel.tensor_group import TensorGroup
from midstream.modeling.vllm.engine.parallel.tensor_parameters import Parameters
from midstream.modeling.vllm.engine.parallel.tensor_survey import TOKENS, Survey


def join(interleaver: Interleaver, config: Any) -> TensorRanks | None:
    """Have an interleaver's blocks see whole tensors; None where one rank has the whole model.

    Args:
        config: vLLM's configuration of the engine.
    """
    size = config.parallel_config.tensor_parallel_size
    if size == 1:
        return None
    ranks = TensorRanks(TensorGroup(), interleaver, Parameters(interleaver.modules, size))
    interleaver.across = ranks
    return ranks


def survey(ranks: TensorRanks, runner: Any) -> None:
    """Find out how the model's values are divided, by one forward on random tokens.

    Args:
        runner: vLLM's model runner on this rank, which has loaded the model.
    """
    from vllm.forward_context import get_forward_context

    config = runner.vllm_config
    heads = runner.model_config.get_total_num_kv_heads()
    found = Survey(runner.blocks.interleaver.modules, ranks.group, heads)
    forward = runner.model.forward

    def watched(*args: Any, **kwargs: Any) -> Any:
        get_forward_context().skip_compiled = True  # a compiled module would call no other
        found.note(Location("", "input"), (args, kwargs))
        value = forward(*args, **kwargs)
        found.note(Location("", "output"), value)
        return value

    found.watch()
    try:
        runner.model.forward = watched
        count = min(TOKENS, config.scheduler_config.max_num_batched_tokens)
        hidden, _ = runner._dummy_run(count, skip_attn=True, is_profile=True, randomize_inputs=True)
        if hidden is not None:
            with torch.inference_mode():
                runner.model.compute_logits(hidden)
    finally:
        runner.model.__dict__.pop("forward", None)
        found.done()
    ranks.layouts = found.layouts()
