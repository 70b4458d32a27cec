"""What blocks of one trace have in common, brought to every worker once."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from midstream.modeling.vllm.ledger import Submission

_NUMBERS = itertools.count(1)


class Commons:
    """The common parts of a trace's requests, from before they are submitted until they are done.

    A worker lets go of a part by itself when all who share it have come. Those that never come,
    refused when they were submitted or aborted while they waited, leave it to be dropped.

    Args:
        submissions: the requests.

    Attributes:
        to_bring: what the workers are to be brought: number, contents, how many ask for it.
    """

    def __init__(self, submissions: Sequence[Submission]):
        uses: Counter[bytes] = Counter()
        for submission in submissions:
            if submission.common:
                uses[submission.common] += submission.params.n
        self._numbers = {common: next(_NUMBERS) for common in uses}
        self.to_bring = [(self._numbers[common], common, uses[common]) for common in uses]

    def tell(self, submission: Submission) -> None:
        """Put the number of a request's part into what it brings; 0 if it has none."""
        if submission.payload is not None:
            common = submission.common
            submission.payload.common = self._numbers[common] if common else 0

    @property
    def numbers(self) -> list[int]:
        """Numbers of the parts, by which the workers forget what is left of them."""
        return list(self._numbers.values())
