"""Two steps of vLLM's sampling that Triton's interpreter cannot run, done by PyTorch on a CPU.

vLLM picks its Triton kernels wherever Triton is there, and these two stop in the interpreter. The
replacements are set on the runner's own objects.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p_pytorch


def replace_kernels(runner: Any) -> None:
    """Let a loaded runner cut to the top k and top p, and apply grammars, without Triton."""
    if runner.sampler is not None:  # only the last stage of a pipeline has one
        runner.sampler._sample_random = _sample_random(runner.sampler._sample_random)
    if runner.structured_outputs_worker is not None:
        runner.structured_outputs_worker.apply_grammar_bitmask = apply_grammar


def _sample_random(draw: Callable[..., Any]) -> Callable[..., Any]:
    def sample_random(
        logits: torch.Tensor,
        rows: Any,
        rows_np: Any,
        positions: Any,
        top_k: torch.Tensor | None,
        top_p: torch.Tensor | None,
        use_fused_sampler: bool,
    ) -> Any:
        logits = apply_top_k_top_p_pytorch(logits, top_k, top_p, allow_cpu_sync=True)
        return draw(logits, rows, rows_np, positions, None, None, use_fused_sampler)

    return sample_random


def apply_grammar(
    logits: torch.Tensor, batch: Any, request_ids: list[str], bitmask: np.ndarray[Any, Any]
) -> None:
    """Set the logits of tokens that a request's grammar refuses to minus infinity, in place.

    Args:
        logits: [rows, vocab]; one row a request.
        batch: vLLM's input batch.
        request_ids: the requests with a grammar.
        bitmask: [requests with a grammar, vocab / 32], int32; a bit a token, lowest first.
    """
    rows = dict(zip(batch.req_ids, batch.cu_num_logits_np, strict=False))
    for request_id, words in zip(request_ids, bitmask, strict=True):
        allowed = np.unpackbits(words.view(np.uint8), bitorder="little")[: logits.shape[-1]]
        logits[int(rows[request_id])].masked_fill_(torch.from_numpy(allowed == 0), -torch.inf)
