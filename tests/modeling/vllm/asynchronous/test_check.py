"""The check of an asynchronous model."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from midstream.errors import UnsupportedError
from tests.modeling.vllm.asynchronous.conftest import Run
from tests.support.checkpoints import A, B


def test_the_check_is_awaited(model: Any, run: Run) -> None:
    """`acheck` passes while other requests run; `check` names it (E1)."""

    async def main() -> None:
        other = asyncio.ensure_future(model.generate(B, max_tokens=4, temperature=0.0))
        check = await model.acheck(A, layers=[0, 2])
        check.raise_for_failure()
        await other

    with pytest.raises(UnsupportedError, match=r"await model.acheck\(\)"):
        model.check(A)
    run(main())


def test_awaiting_the_check_of_another_model_is_refused(llama: Any) -> None:
    """A model without an event loop says to write `check`."""
    with pytest.raises(UnsupportedError, match=r"Write `model.check\(\)`"):
        asyncio.run(llama.acheck(A))
