"""The page "Limits and errors" names every error, every warning and every limit."""

from __future__ import annotations

from pathlib import Path

import pytest

from midstream import errors
from midstream.modeling.vllm.limits import NAMES

PAGE = (Path(__file__).parents[2] / "docs/limits.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", [*errors.__all__, *NAMES])
def test_page_names(name: str) -> None:
    """What a user may meet is looked up there."""
    assert f"`{name}`" in PAGE
