"""Plain vLLM beside midstream, in one environment and in one process, is what it is without."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.modeling.vllm.scripts.running import Program
from tests.support.checkpoints import checkpoint

SCRIPTS = Path(__file__).parent / "scripts"
SITECUSTOMIZE = """
import os, sys
kind = "started" if "--multiprocessing-fork" in sys.orig_argv else "other"
open(os.path.join({folder!r}, f"{{kind}}-{{os.getpid()}}"), "w").close()
raise RuntimeError("a mistake of the user's")
"""


@pytest.fixture(scope="module")
def marks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a user's own sitecustomize, which leaves a file there whenever it runs."""
    folder = tmp_path_factory.mktemp("user")
    (folder / "sitecustomize.py").write_text(SITECUSTOMIZE.format(folder=str(folder)))
    return folder


@pytest.fixture(scope="module")
def plain(marks: Path) -> Iterator[Program]:
    """A program that has a midstream engine, closes it, and then has a plain one."""
    checkpoint("T-LLAMA", with_tokenizer=True)
    program = Program(
        SCRIPTS / "plain.py",
        path=(marks,),
        environment={"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"},  # asks workers for type names
    )
    yield program
    program.end()


def test_import_is_light(plain: Program) -> None:
    """Importing midstream imports neither PyTorch nor vLLM (A8)."""
    assert plain.facts("import")["heavy"] == []


def test_close_leaves_nothing(plain: Program) -> None:
    """After `close()` there is no process of the engine and no shared memory, twice closed too.

    (O13, A19).
    """
    assert plain.facts("midstream")["shared_memory"]
    facts = plain.facts("afterwards")
    assert facts["processes"] == []
    assert facts["shared_memory"] == []


def test_nothing_is_changed(plain: Program) -> None:
    """An engine changes neither environment, paths, Triton's backends nor vLLM's code (A8)."""
    facts = plain.facts("afterwards")
    assert facts["names"] > 5000
    assert facts["changed"] == []
    seen = {change.partition(":")[0] for change in facts["patched"]}
    assert seen >= {"environment", "vllm.v1.engine.core.EngineCore.step"}


def test_cuda_stays_untouched(plain: Program) -> None:
    """The client half never initialises CUDA (O13, A22)."""
    assert plain.facts("afterwards")["cuda"] == []


def test_a_tree_leaves_no_process_group(plain: Program) -> None:
    """The group that building the tree needs is gone; the engine has its own elsewhere (A12)."""
    assert plain.facts("midstream")["group"] is False


def test_plain_engine_is_plain(plain: Program) -> None:
    """A plain `LLM` has vLLM's own parts, none of midstream's, and the same tokens."""
    ours, facts = plain.facts("midstream"), plain.facts("plain")
    assert facts["tokens"] == ours["tokens"]
    assert facts["scheduler"] == "None"
    assert parts(facts) == (
        "vllm.v1.worker.cpu_worker",
        "vllm.v1.worker.cpu_model_runner",  # the older runner: a plain CPU engine's
        [],
        None,
    )
    worker, runner, modules, interpreter = parts(ours)
    assert worker == runner == "midstream.modeling.vllm.engine.cpu_worker"
    assert modules
    assert interpreter == "1"
    assert "_bootstrap" in ours["parts"]["path"]
    assert "_bootstrap" not in facts["parts"]["path"]


def parts(facts: dict[str, Any]) -> tuple[Any, ...]:
    """What tells a worker process with midstream from one without."""
    return tuple(facts["parts"][name] for name in ("worker", "runner", "midstream", "interpreter"))


def test_users_sitecustomize_runs(plain: Program, marks: Path) -> None:
    """A sitecustomize of the user's runs in engine processes, and may fail there."""
    plain.facts("plain")
    started = list(marks.glob("started-*"))
    assert len(started) == 4  # core and worker, of midstream's engine and of the plain one
