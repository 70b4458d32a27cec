"""The structure page names every module."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_module_is_on_the_structure_page() -> None:
    """A module that the page does not name is a module nobody finds."""
    page = (ROOT / "docs/structure.md").read_text(encoding="utf-8")
    package = ROOT / "src/midstream"
    modules = [path for path in package.rglob("*.py") if not path.stem.startswith("_")]
    listed = [path for path in modules if "payloads" not in path.parts]  # one line for the folder
    assert len(listed) > 40
    assert [path.stem for path in listed if f"`{path.stem}`" not in page] == []
