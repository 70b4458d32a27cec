"""Which token ids a block may give its request: those of the vocabulary that its grammar takes."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from midstream.interleaving.copies import Rows


class TokenCheck:
    """Raises for a token id that a request cannot go on from.

    Args:
        vocabulary: the model's number of token ids; the next step's lookup would fail with others.
        request_ids: the requests of the step's rows.
        grammar: vLLM's grammar output of the step, if a request has a grammar. Given another
            token vLLM would end the request without saying why.
    """

    def __init__(self, vocabulary: int, request_ids: list[str], grammar: Any):
        self._vocabulary, self._request_ids, self._grammar = vocabulary, request_ids, grammar

    def __call__(self, index: int, ids: torch.Tensor, rows: Rows) -> None:
        """Check the ids of one request.

        Raises:
            ValueError: an id outside the vocabulary, or one that the request's grammar refuses.
        """
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= self._vocabulary:
            raise ValueError(
                f"model.samples was given token id {low if low < 0 else high}; the model's ids "
                f"run from 0 to {self._vocabulary - 1}."
            )
        if not self._allowed(self._request_ids[rows.start], high):
            raise ValueError(
                f"model.samples was given token id {high}, which the request's grammar "
                "(structured_outputs) refuses at this place. Edit `model.logits` to choose among "
                "the tokens that it takes, or leave the grammar out."
            )

    def _allowed(self, request_id: str, token: int) -> bool:
        ids = self._grammar.structured_output_request_ids if self._grammar is not None else []
        if request_id not in ids:
            return True
        words: np.ndarray[Any, Any] = self._grammar.grammar_bitmask[ids.index(request_id)]
        return bool(int(words[token // 32]) >> (token % 32) & 1)
