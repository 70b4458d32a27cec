"""What installed edits leave behind, on vLLM's outputs."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from midstream.errors import InterventionError, MidstreamWarning
from midstream.modeling.merging import merge
from midstream.modeling.vllm.failures import failure
from midstream.modeling.vllm.ledger import Outcome
from midstream.modeling.vllm.payloads import Record


def attach_edits(outcomes: Sequence[Outcome]) -> None:
    """Put what edits saved, and why one failed, on the outputs of their requests.

    An output whose request ran edits gets ``saves``, their values by name (of two edits' values
    under one name the later installed one's; with several sequences a list of theirs), and
    ``edit_error``, an `InterventionError` or None. Each completion has its own ``saves``.
    """
    for outcome in outcomes:
        if not outcome.edited:
            continue
        records = [[found[i] for i in sorted(found)] for found in outcome.edits]
        found = [_sequence(of_edits) for of_edits in records]
        met = [record.error for of_edits in records for record in of_edits if record.error]
        if outcome.output is not None:
            for completion in outcome.output.outputs:
                completion.saves = found[completion.index]
            outcome.output.saves = merge(found, {})
            outcome.output.edit_error = failure(met)


def attach_saves(outcome: Outcome) -> None:
    """Put on a finished output what its request's blocks saved, edits' and its own.

    ``saves`` has the values by name, the block's own before those of edits (with several sequences
    a list of theirs), and so has each completion's.
    """
    attach_edits([outcome])
    records = [record.saves if record is not None else {} for record in outcome.records]
    output = outcome.output
    output.saves = {**getattr(output, "saves", {}), **merge(records, {})}
    for completion in output.outputs:
        completion.saves = {**getattr(completion, "saves", {}), **records[completion.index]}


def attach_new_saves(outcome: Outcome, output: Any) -> None:
    """Put on an output what has been appended to saved lists since the one before.

    ``new_saves`` has the items by the name of their list (with several sequences a list of theirs),
    and so has each completion's.
    """
    new, outcome.new = outcome.new, [{} for _ in outcome.new]
    output.new_saves = merge(new, {})
    for completion in output.outputs:
        completion.new_saves = new[completion.index]


def _sequence(records: Sequence[Record]) -> Mapping[str, Any]:
    return {name: value for record in records for name, value in record.saves.items()}


def edit_records(outcomes: Sequence[Outcome]) -> list[Record]:
    """What the edits of some requests left, one after the other."""
    sequences = (found for outcome in outcomes for found in outcome.edits)
    return [found[edit] for found in sequences for edit in sorted(found)]


def warn_of_failures(outcomes: Sequence[Outcome], stacklevel: int) -> None:
    """Warn that edits failed beside plain requests, which go on without them."""
    failed: list[InterventionError] = [
        outcome.output.edit_error
        for outcome in outcomes
        if outcome.output is not None and getattr(outcome.output, "edit_error", None)
    ]
    if failed:
        if isinstance(failed[0].__cause__, KeyboardInterrupt):
            raise failed[0].__cause__
        text = str(failed[0]).partition("\n")[0]
        warnings.warn(
            f"An installed edit failed in {len(failed)} of {len(outcomes)} requests; they went on "
            f"without it. The first error (see `output.edit_error`): {text}",
            MidstreamWarning,
            stacklevel=stacklevel,
        )
