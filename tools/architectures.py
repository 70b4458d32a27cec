"""Write the table of `docs/architectures.md`: what `model.check()` finds on each architecture.

Each row is a tiny checkpoint with random weights, served by vLLM on this machine and compared with
HuggingFace's forward in float32. What fails is a row too.

Usage, from the root of a checkout: python -m tools.architectures [--only "Llama,Gemma 2"]
"""

from __future__ import annotations

import os

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import argparse
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from midstream import VLLM
from midstream.modeling.vllm import bootstrap
from midstream.modeling.vllm.checking.report import Check, Row
from tests.support.catalogue import CATALOGUE, Entry
from tests.support.groups import give_experts_a_group
from tests.support.rotary import rotate_in_pytorch

PAGE = Path(__file__).resolve().parents[1] / "docs" / "architectures.md"
BEGIN, END = "<!-- table -->", "<!-- end of table -->"
HEAD = (
    "| model | class in vLLM | runs as | stream leaving a layer | streams | attention | MLP | "
    "router | final norm | logits | writes | largest error | |\n" + "|---" * 13 + "|"
)
ENGINE: Mapping[str, Any] = {
    "max_model_len": 512,
    "block_size": 32,
    "max_num_seqs": 8,
    "kv_cache_memory_bytes": 1 << 28,
    "skip_tokenizer_init": True,
}


def main() -> None:
    """Check the architectures that are asked for, writing the table after each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", help="titles, with commas between them")
    only = parser.parse_args().only
    bootstrap.prepare_process(bootstrap.installed())  # before transformers imports Triton
    titles = only.split(",") if only else list(CATALOGUE)
    lines = _lines(PAGE.read_text(encoding="utf-8"))
    for title in titles:
        start = time.monotonic()
        lines[title] = row_of(CATALOGUE[title])
        print(f"{time.monotonic() - start:.0f} s  {lines[title]}", flush=True)
        _write(lines)


def row_of(entry: Entry) -> str:
    """One line of the table."""
    first = f"| {entry.title} | `{entry.architecture}` "
    try:
        with _processes(entry.apart), engine(entry) as model:
            return first + cells(checked(model, entry), kind(model, entry), entry.note)
    except Exception as error:  # noqa: BLE001  # an honest row for whatever goes wrong
        print(f"{entry.title}: {type(error).__name__}: {error}", flush=True)
        return first + "| - " * 10 + f"| {_reason(entry, error)} |"


@contextmanager
def engine(entry: Entry) -> Iterator[VLLM]:
    """An engine on the entry's checkpoint."""
    give_experts_a_group()
    with VLLM(str(entry.checkpoint()), dtype=entry.dtype, **ENGINE) as model:
        if entry.native_rotary:
            model.dispatch()
            rotate_in_pytorch(model)
        yield model


def checked(model: VLLM, entry: Entry) -> Check:
    """What the check finds."""
    return model.check(tolerance=entry.tolerance)


def kind(model: VLLM, entry: Entry) -> str:
    """How vLLM runs it, and in which dtype."""
    module = type(model.tree.modules[""]).__module__
    backend = "Transformers backend" if ".transformers" in module else "native"
    return backend if entry.dtype == "float32" else f"{backend}, {entry.dtype}"


def cells(check: Check, how: str, note: str) -> str:
    """The cells of a line behind its first two."""
    groups = {name: [row for row in check if _group(row) == name] for name in _GROUPS}
    found = [how, f"`{check.stream}`", *map(_counted, groups.values())]
    errors = [row.error for row in check if row.error == row.error]
    notes = [note, *sorted({f"{row.name}: {row.note}" for row in check.failures if row.note})]
    return "".join(f"| {cell} " for cell in [*found, f"{max(errors):.0e}", _joined(notes)]) + "|"


_GROUPS = ("stream", "attention", "mlp", "router", "final norm", "logits", "writes")


def _group(row: Row) -> str:
    if re.fullmatch(r"(stream|attention|mlp|router) \d+", row.name):
        return row.name.split()[0]
    return row.name if row.name in _GROUPS else "writes"


def _counted(rows: list[Row]) -> str:
    """How many of the comparisons were equal."""
    if not rows:
        return "-"
    equal = sum(row.passed for row in rows)
    return "equal" if equal == len(rows) else f"**{equal} of {len(rows)}**"


def _joined(notes: list[str]) -> str:
    return "; ".join(note for note in notes if note)


def _reason(entry: Entry, error: BaseException) -> str:
    text = " ".join(str(error).replace(str(entry.checkpoint()), "...").split())
    return _joined([f"**does not run:** {type(error).__name__}: {text[:160]}", entry.note])


@contextmanager
def _processes(apart: bool) -> Iterator[None]:
    """Whether the engine has a process of its own."""
    name = "VLLM_ENABLE_V1_MULTIPROCESSING"
    before = os.environ[name]
    os.environ[name] = "1" if apart else before
    try:
        yield
    finally:
        os.environ[name] = before


def _lines(page: str) -> dict[str, str]:
    """Lines of the table that is there, by title."""
    table = page.partition(BEGIN)[2].partition(END)[0].strip().splitlines()[2:]
    return {line.split("|")[1].strip(): line for line in table}


def _write(lines: Mapping[str, str]) -> None:
    page = PAGE.read_text(encoding="utf-8")
    before, rest = page.partition(BEGIN)[0], page.partition(END)[2]
    rows = [lines[title] for title in CATALOGUE if title in lines]
    table = "\n".join([BEGIN, "", HEAD, *rows, "", END])
    PAGE.write_text(f"{before}{table}{rest}", encoding="utf-8")


if __name__ == "__main__":
    main()
