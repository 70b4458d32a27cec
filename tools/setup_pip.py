"""pip in a venv, with its progress in short and its errors in full. Standard library only."""

from __future__ import annotations

import json
import os
import re
import subprocess
import threading
import time
from collections.abc import Iterable
from pathlib import Path

# the address of an index is the user's to name, see CONTRIBUTING.md
TORCH_INDEX = "MIDSTREAM_TORCH_INDEX"
# the second is how pip says it where a constraints file names the package as well
NOT_FOUND = re.compile(r"No matching distribution found|ResolutionImpossible")
UNREACHABLE = re.compile(r"WARNING: Retrying")  # pip ends in "no matching" offline, too
SHOWN = re.compile(r"^\s*(Downloading .* \([\d.]+ [MG]B\)|Building wheel)")
SILENCE = 15  # seconds without a line after which the time is shown


class SetupError(Exception):
    """Setting up cannot go on; the text says why and what to do."""


def say(text: str) -> None:
    """Print one line of progress at once, even into a pipe."""
    print(f"[setup] {text}", flush=True)


class Pip:
    """Runs pip and Python of one venv; the whole output goes to `midstream-setup.log` there."""

    def __init__(self, venv: Path) -> None:
        self.python = str(venv / "bin" / "python")
        self.log = venv / "midstream-setup.log"

    def install(self, what: str, *arguments: str) -> None:
        """Install and show progress; SetupError with pip's last lines when it fails."""
        say(f"installing {what}")
        code, lines = self.run("install", *arguments)
        if code:
            raise SetupError(
                f"pip could not install {what}:\n{_tail(lines)}\nAll of it: {self.log}"
            )

    def install_cpu_torch(self, version: str) -> None:
        """Install CPU torch from where pip looks, else from the index the user named."""
        say(f"installing CPU torch {version}, about 200 MB")
        requirement, index = f"torch=={version}", os.environ.get(TORCH_INDEX)
        tries: list[list[str]] = [[], ["--extra-index-url", index]] if index else [[]]
        for extra in tries:
            code, lines = self.run("install", *extra, requirement)
            if code == 0:
                return
            output = "\n".join(lines)
            if UNREACHABLE.search(output) or not NOT_FOUND.search(output):
                raise SetupError(f"pip could not install {requirement}:\n{_tail(lines)}")
            if index and not extra:
                say(f"pip finds no {requirement} by itself: trying ${TORCH_INDEX}")
        raise SetupError(_no_torch(requirement, index))

    def run(self, *arguments: str) -> tuple[int, list[str]]:
        """Run one pip command; returns its exit code and its lines, errors among them."""
        command = [self.python, "-m", "pip", *arguments]
        env = {**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PYTHONUNBUFFERED": "1"}
        lines: list[str] = []
        with Heartbeat() as heart, open(self.log, "a", encoding="utf-8") as log:
            log.write(f"$ {' '.join(command)}\n")
            log.flush()
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                env=env,
            )
            for line in process.stdout or ():
                log.write(line)
                lines.append(line.rstrip())
                heart.heard(lines[-1])
            return process.wait(), lines

    def versions(self, names: Iterable[str]) -> dict[str, str]:
        """Installed versions of those of the packages that are installed."""
        code = (
            "import importlib.metadata as m, json, sys\n"
            "have = {d.metadata['Name'].lower(): d.version for d in m.distributions()}\n"
            "print(json.dumps({n: have[n] for n in sys.argv[1:] if n in have}))"
        )
        command = [self.python, "-c", code, *names]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        return dict(json.loads(done.stdout))

    def works(self) -> bool:
        """Whether the venv is there and whole."""
        try:
            command = [self.python, "-m", "pip", "--version"]
            return subprocess.run(command, capture_output=True).returncode == 0
        except OSError:
            return False

    def error_of(self, statement: str) -> str | None:
        """Last line of the error that a statement ends with in a fresh process, or None."""
        with Heartbeat():
            command = [self.python, "-c", statement]
            done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode == 0:
            return None
        return (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]


class Heartbeat:
    """Shows pip's telling lines, and the time that passed whenever it has been silent a while."""

    def __enter__(self) -> Heartbeat:
        self._start = self._last = time.monotonic()
        self._stop = threading.Event()
        self._doing = ""
        self._thread = threading.Thread(target=self._beat, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def heard(self, line: str) -> None:
        """Take one line of pip's output."""
        if line.startswith("Installing collected packages"):
            self._doing = f"unpacking {line.count(',') + 1} packages, "
            self._show(f"unpacking {line.count(',') + 1} packages")
        elif SHOWN.match(line):
            self._show(line.strip()[:110])

    def _show(self, text: str) -> None:
        self._last = time.monotonic()
        print(f"[setup]   {text}", flush=True)

    def _beat(self) -> None:
        while not self._stop.wait(1):
            now = time.monotonic()
            if now - self._last > SILENCE:
                self._show(f"... {self._doing}{now - self._start:.0f} s")


def _tail(lines: list[str], count: int = 25) -> str:
    telling = [line for line in lines if line and not line.startswith("WARNING: Location")]
    return "\n".join(telling[-count:])


def _no_torch(requirement: str, index: str | None) -> str:
    looked = "where pip looks" + (f", nor in ${TORCH_INDEX} ({index})" if index else "")
    return (
        f"the CPU engine needs {requirement}, and there is none for this Python {looked}.\n"
        f"Nothing large was downloaded. Do one of these and run the command again:\n"
        f"  - set {TORCH_INDEX} to the address of PyTorch's CPU wheel index (PyTorch's own\n"
        f"    installation page shows it after --index-url, with Pip and CPU selected);\n"
        f"  - set PIP_FIND_LINKS to a folder that holds the wheel;\n"
        f"  - name another Python that the wheel exists for: make PYTHON=/path/to/python3.x ..."
    )
