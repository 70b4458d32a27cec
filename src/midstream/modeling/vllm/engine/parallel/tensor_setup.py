"""Joins one worker to the other ranks of its engine, once its model is loaded."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

from midstream.interleaving.interleaver import Interleaver
from midstream.interleaving.locations import Location
from midstream.modeling.vllm.engine.parallel.tensor import TensorRanks
from midstream.modeling.vllm.engine.parallel.tensor_group import TensorGroup
from midstream.modeling.vllm.engine.parallel.tensor_parameters import Parameters
from midstream.modeling.vllm.engine.parallel.tensor_survey import TOKENS, Survey, Watching

_PATIENCE = 2.0
_LOGGER = logging.getLogger(__name__)


def patience() -> float:
    """Seconds that this rank gives blocks beyond their limits: the first ends those that loop."""
    from vllm.distributed.parallel_state import get_tp_group

    return _PATIENCE if get_tp_group().rank_in_group else 0.0


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
    heads = runner.model_config.get_total_num_kv_heads()
    for operations in (True, False):
        found = Survey(runner.blocks.interleaver.modules, ranks.group, heads)
        try:
            _run(runner, found, operations=operations)
        except Exception as error:
            if not operations:
                raise
            _LOGGER.warning("Operations inside forwards are not known: %r", error)
        else:
            ranks.layouts = found.layouts()
            return


def _run(runner: Any, found: Survey, *, operations: bool) -> None:
    """Run one forward and the head, with all locations shown."""
    from vllm.forward_context import get_forward_context

    watching = Watching(runner.blocks.interleaver.modules, found.note, operations=operations)
    forward = runner.model.forward

    def watched(*args: Any, **kwargs: Any) -> Any:
        get_forward_context().skip_compiled = True  # a compiled module would call no other
        found.note(Location("", "input"), (args, kwargs))
        run = watching.sources.call if operations else _plainly
        value = run("", forward, args, kwargs)
        found.note(Location("", "output"), value)
        return value

    with watching.watching():
        try:
            runner.model.forward = watched
            count = min(TOKENS, runner.vllm_config.scheduler_config.max_num_batched_tokens)
            hidden, _ = runner._dummy_run(
                count, skip_attn=True, is_profile=True, randomize_inputs=True
            )
        finally:
            runner.model.__dict__.pop("forward", None)
        if hidden is not None:
            with torch.inference_mode():
                runner.model.compute_logits(hidden)


def _plainly(path: str, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    return forward(*args, **kwargs)
