"""Every python snippet of the README and the documentation runs and prints what it says."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from docs_snippets import Snippet, assert_output, run_page, snippets

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
WITH_CODE = [page for page in PAGES if snippets(page)]
# arguments that leave the shared engine the right one; any other is the real constructor's
SERVER = "http://localhost:8000"
SHARED = {
    "dtype",
    "max_model_len",
    "dispatch",
    "kv_cache_memory_bytes",
    "pipeline_parallel_size",
}  # a block is the same on several stages


@pytest.fixture
def shared_engine(demo_engine: Any, demo_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Let pages that construct a VLLM have the suite's engine, which they cannot close."""
    import midstream

    real: Callable[..., Any] = midstream.VLLM
    close = midstream.VLLM.close

    def construct(repo: str, **arguments: Any) -> Any:
        if set(arguments) <= SHARED:
            return demo_engine
        if arguments.get("mode") == "async":  # an engine of its own, of the same checkpoint
            return real(demo_engine.repo, **arguments)
        return real(repo, **arguments)

    monkeypatch.setattr(midstream, "VLLM", construct)
    monkeypatch.setattr(midstream, "TransformersModel", partial(_demo, demo_path))
    monkeypatch.setattr(real, "close", lambda model: model is demo_engine or close(model))
    return demo_engine


@pytest.fixture(scope="module")
def demo_server(demo_path: Path) -> Iterator[str]:
    """Address of a server of the demo model, as the page on serving starts it."""
    from tests.serve.process import Server

    flags = ("--dtype", "float32", "--max-model-len", "512", "--api-key", "secret")
    made = Server("--kv-cache-memory-bytes", str(1 << 29), model=str(demo_path), flags=flags)
    try:
        yield made.wait().url
    finally:
        made.end()


def _demo(folder: Path, repo: str, **arguments: Any) -> Any:
    """A HuggingFace model whose repository is the demo model's folder."""
    from midstream.modeling.transformers import TransformersModel

    return TransformersModel(folder, **arguments)


@pytest.mark.parametrize("page", WITH_CODE, ids=lambda page: page.name)
def test_page_runs(page: Path, shared_engine: Any, request: pytest.FixtureRequest) -> None:
    """The blocks of a page run in order, as one program, and print what the page says (case 47)."""
    served = any(SERVER in snippet.code for snippet in snippets(page))
    replacing = {SERVER: request.getfixturevalue("demo_server")} if served else {}
    assert run_page(page, replacing) > 0


def test_pages_with_code_are_found() -> None:
    """The pages that this suite is about are there and have code."""
    names = {page.name for page in WITH_CODE}
    assert {"README.md", "index.md", "loading.md", "writing.md", "locations.md"} <= names


def snippet(code: str) -> Snippet:
    """Return a block of an imagined page."""
    return Snippet(Path("page.md"), 7, code)


def test_output_must_be_what_the_page_says() -> None:
    """Equal lines pass, and a line too many, too few or different fails."""
    block = snippet("print(1)\n# prints: 1\n# prints: x ...\n")
    assert_output(block, ["1", "x and more"])
    for wrong in (["1"], ["1", "x", "3"], ["1", "y"], []):
        with pytest.raises(AssertionError, match=r"page\.md:7"):
            assert_output(block, wrong)


def test_output_that_no_comment_names_fails() -> None:
    """A block that prints without saying so fails, unless it ends in dots."""
    with pytest.raises(AssertionError, match="printed"):
        assert_output(snippet("print(1)\n"), ["1"])
    assert_output(snippet("print(1)\n# prints: ...\n"), ["1", "2"])


def test_blocks_of_a_page_share_names_and_have_a_source(tmp_path: Path) -> None:
    """A later block sees the names of an earlier one, and inspect finds a function's source."""
    page = tmp_path / "page.md"
    page.write_text(
        "text\n```python\ndef f():\n    return 1\n```\nmore\n```python\nimport inspect\n\n"
        "print(f(), inspect.getsourcelines(f)[1])\n# prints: 1 3\n```\n"
    )
    assert run_page(page) == 2
