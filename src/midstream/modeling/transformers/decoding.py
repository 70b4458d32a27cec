"""What lies behind a forward of transformers: logits, and the tokens that `generate` draws.

This is the one file that reaches into the decoding loop: the criteria that end it are asked after
each token, and ours, which comes first, is where blocks meet the token.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from midstream.interleaving.beside import Halt
from midstream.interleaving.copies import Rows
from midstream.interleaving.locations import LOGITS, SAMPLES
from midstream.modeling.local.running import Running


def hand_logits(running: Running, value: Any, ends: Sequence[int] | None = None) -> Any:
    """Offer the logits of each row's last token to the blocks that wait for them.

    Args:
        value: what the forward returned; with ``logits`` ``[batch, tokens, vocab]`` or
            ``[batch, classes]``.
        ends: where each row's last token is; None where it is the last of all.

    Returns:
        What the call goes on with.
    """
    logits = getattr(value, "logits", None)
    if not running.waits_for(LOGITS) or not isinstance(logits, torch.Tensor):
        return value
    place, is_view = _place(logits, ends)
    last = logits[place]
    new = running.hand_over(LOGITS, last)
    if is_view and (new is last or _is_copy(new, last)):  # what was written is in `logits`
        return value
    edited = logits.clone()
    edited[place] = new
    value = copy.copy(value)
    value.logits = edited
    return value


def _place(logits: torch.Tensor, ends: Sequence[int] | None) -> tuple[Any, bool]:
    """The index of the last tokens' logits, and whether what it gives is a view."""
    if logits.dim() != 3:
        return ..., True
    if ends is None or len(ends) != len(logits) or max(ends) >= logits.shape[1]:
        return (slice(None), -1), True
    rows = torch.arange(len(ends), device=logits.device)
    return (rows, torch.tensor(ends, device=logits.device)), False


def _is_copy(new: torch.Tensor, last: torch.Tensor) -> bool:
    """Whether a tensor is what the model goes on with where a block was given the live one."""
    made, node = new.grad_fn, last.grad_fn
    if made is None or node is None or made.name() != "CloneBackward0":
        return False
    return made.next_functions[0][0] is node


@contextmanager
def drawing(module: torch.nn.Module, running: Running) -> Iterator[None]:
    """Let blocks meet the tokens that a module's `generate` draws, one a row of the batch.

    Not under beam search, which draws no tokens of its own.
    """
    own = getattr(module, "_get_stopping_criteria", None)
    if own is None:
        yield
        return

    def criteria(generation_config: Any, *args: Any, **keywords: Any) -> Any:
        found = own(generation_config, *args, **keywords)
        if (generation_config.num_beams or 1) == 1:
            found.insert(0, _Drawn(running, _vocabulary(module)))
        return found

    module.__dict__["_get_stopping_criteria"] = criteria
    try:
        yield
    finally:
        del module.__dict__["_get_stopping_criteria"]


class _Drawn:
    """A criterion of `generate`: hands over the tokens, and ends the rows of stopped blocks."""

    def __init__(self, running: Running, vocabulary: int | None):
        self._running, self._vocabulary = running, vocabulary

    def __call__(self, input_ids: torch.Tensor, scores: Any, **keywords: Any) -> torch.Tensor:
        """Called with all ids ``[batch, tokens]``, the new one last; which rows are done."""
        drawn = input_ids[:, -1:]
        try:
            new = self._running.hand_over(SAMPLES, drawn, self._check)
        except Halt:  # no block needs more; the call still gives what it has drawn
            return torch.ones(len(input_ids), dtype=torch.bool, device=input_ids.device)
        if new is not drawn:
            drawn.copy_(new)
        done = torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)
        for rows in self._running.stopped_rows():
            done[rows.start : rows.stop] = True
        return done

    def _check(self, index: int, value: torch.Tensor, rows: Rows) -> None:
        """Refuse ids that the model has no embedding for."""
        if self._vocabulary is None or not value.numel():
            return
        low, high = int(value.min()), int(value.max())
        if low < 0 or high >= self._vocabulary:
            raise ValueError(
                f"model.samples was given the token id {low if low < 0 else high}; ids of this "
                f"model are 0 to {self._vocabulary - 1}."
            )


def _vocabulary(module: Any) -> int | None:
    embeddings = module.get_input_embeddings()
    found = getattr(embeddings, "num_embeddings", None)
    return None if found is None else int(found)
