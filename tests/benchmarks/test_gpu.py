"""The GPU benchmark runs, from the command to the table, on a tiny model on the CPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import gpu

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu.py"
ROWS = ("idle", "one-layer", "half", "poisson", "data")
SIZES = ("--batches", "1,2", "--tokens", "4", "--repeats", "1")

pytestmark = pytest.mark.timeout(600)  # three engines, one after the other


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> list[list[str]]:
    """Lines of the tables of one run, as lists of cells."""
    out = tmp_path_factory.mktemp("gpu") / "gpu.md"
    command = [sys.executable, str(SCRIPT), "--tiny", "--rows", ",".join(ROWS), *SIZES]
    ran = subprocess.run([*command, "--out", str(out)], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-3000:]
    text = out.read_text()
    assert text in ran.stdout
    return [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in text.splitlines()
        if line.startswith("|")
    ]


def test_every_row_is_measured(lines: list[list[str]]) -> None:
    """The table has a line for each row, number of requests and kind of run."""
    found = [(line[0].partition(":")[0].strip("`"), *line[1:3]) for line in lines if "`" in line[0]]
    batches = [(row, n, run) for row in ROWS[:2] for n in "12" for run in ("first", "")]
    expected = [each for each in batches if each[0] != "idle" or not each[2]]
    expected += [(row, "2", run) for row in ("half", "poisson") for run in ("first", "")]
    expected += [("data", n, run) for n in "12" for run in ("first", "")]
    assert found == expected


def test_ratios_are_sane(lines: list[list[str]]) -> None:
    """Every line has both times and a share of plain vLLM's tokens per second, and none failed."""
    ours = [line for line in lines if "`" in line[0]]
    assert all("failed" not in line[-1] for line in ours)
    assert all(line[3] and line[4] for line in ours)
    assert all(0 < float(line[5]) < 20 for line in ours)


def test_plain_runs_first_and_last(lines: list[list[str]]) -> None:
    """Plain vLLM is measured in two processes, with a ratio of the two."""
    plain = {(line[0], line[1]): line[2:] for line in lines if line[0] in ("decode", "half")}
    assert set(plain) == {("decode", "1"), ("decode", "2"), ("half", "2")}
    for first, last, drift in plain.values():
        assert "ms a step" in first
        assert "ms a step" in last
        assert float(drift) > 0


def test_data_dependent_reads_are_judged(lines: list[list[str]]) -> None:
    """The layer that a token chose is compared with both layers, and found right."""
    notes = [line[-1] for line in lines if line[0].startswith("`data`") and not line[2]]
    assert len(notes) == 2
    assert all(note.startswith("right: ") for note in notes)


def test_unknown_row_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """A row that does not exist is refused before anything starts, with those there are."""
    with pytest.raises(SystemExit):
        gpu.parser().parse_args(["--rows", "idle,nothing"])
    told = capsys.readouterr().err
    assert "'nothing'" in told
    assert "one-layer" in told


def test_failed_process_is_told(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A process that does not come up is told in the table, and by the command's status."""
    out = tmp_path / "gpu.md"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu, "__file__", str(tmp_path / "absent.py"))
        with pytest.raises(SystemExit) as ended:
            gpu.main(["--tiny", "--rows", "idle", "--out", str(out)])
    assert ended.value.code == 1
    assert "The process `plain-first` failed: it ended with status 2" in out.read_text()
    assert "Not measured: idle." in out.read_text()
    assert "absent.py" in capfd.readouterr().err


def test_nothing_begins_without_budget(tmp_path: Path) -> None:
    """Where the time is up no process is started, and the table says what is missing."""
    out = tmp_path / "gpu.md"
    gpu.main(["--tiny", "--rows", "idle", "--budget=-1", "--out", str(out)])
    assert "Not measured: idle." in out.read_text()
