"""How many examples, and from which seed."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, Phase, Verbosity, seed, settings

COUNT = int(os.environ.get("MIDSTREAM_FUZZ_COUNT", "200"))
"""Examples of all fuzz tests together; `MIDSTREAM_FUZZ_COUNT`."""
SEED = int(os.environ.get("MIDSTREAM_FUZZ_SEED", "1"))
"""Where they start; `MIDSTREAM_FUZZ_SEED`."""


def examples(share: float, *, shrink: bool = True) -> Callable[[Any], Any]:
    """Settings of a fuzz test that gets a share of the examples.

    The same seed gives the same examples on every machine: no database, no deadline.
    """
    phases = [Phase.generate, *([Phase.shrink] if shrink else [])]
    chosen = settings(
        max_examples=max(1, round(COUNT * share)),
        database=None,
        deadline=None,
        phases=phases,
        print_blob=False,
        verbosity=Verbosity.normal,
        suppress_health_check=list(HealthCheck),
    )
    return lambda test: seed(SEED)(chosen(test))
