"""What blocks of one trace have in common, brought to every worker once."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from midstream.modeling.vllm.client import Submission

_NUMBERS = itertools.count(1)


class Commons:
    """The common parts of a trace's requests, from before they are submitted until they are done.

    A worker lets go of a part by itself when all who share it have come. ``drop`` is for those that
    never come: refused when they were submitted, or aborted while they waited.

    Args:
        call: calls a method of every worker.
        submissions: the requests.
    """

    def __init__(self, call: Callable[..., Any], submissions: Sequence[Submission]):
        self._call = call
        uses: Counter[bytes] = Counter()
        for submission in submissions:
            if submission.common:
                uses[submission.common] += submission.params.n
        self._numbers = {common: next(_NUMBERS) for common in uses}
        if uses:
            parts = [(self._numbers[common], common, uses[common]) for common in uses]
            call("midstream_bring", args=(parts,))

    def number(self, submission: Submission) -> int:
        """Number of a request's part; 0 if it has none."""
        return self._numbers[submission.common] if submission.common else 0

    def drop(self) -> None:
        """Have the workers forget what is left of the parts."""
        if self._numbers:
            self._call("midstream_drop", args=(list(self._numbers.values()),))
