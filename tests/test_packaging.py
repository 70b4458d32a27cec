"""What the package declares of itself."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from midstream import cli

PROJECT = Path(__file__).parents[1] / "pyproject.toml"


@pytest.fixture(scope="module")
def project() -> Any:
    """The package's declaration."""
    return tomllib.loads(PROJECT.read_text(encoding="utf-8"))["project"]


@pytest.mark.parametrize("extra", ["vllm", "cpu"])
def test_vllm_is_bounded(project: Any, extra: str) -> None:
    """The extras take every release of the supported series of vLLM and no other (A6)."""
    (text,) = project["optional-dependencies"][extra]
    allowed = Requirement(text).specifier
    assert [v for v in ("0.31.9", "0.32.0", "0.32.5", "0.33.0") if v in allowed] == [
        "0.32.0",
        "0.32.5",
    ]


def test_declaration_of_the_package(project: Any) -> None:
    """It needs Python 3.11 and no vLLM, and brings the command `midstream` (A7)."""
    assert project["requires-python"] == ">=3.11"
    assert project["scripts"] == {"midstream": "midstream.cli:app"}
    assert callable(cli.app)
    needed = {Requirement(text).name for text in project["dependencies"]}
    assert {"torch", "greenlet", "cloudpickle"} <= needed
    assert not needed & {"vllm", "transformers"}
