"""Whatever a block does, it ends in a clear error or a right result, and leaves nothing behind."""

from __future__ import annotations

import errno
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from midstream import VLLM
from midstream.errors import InterventionError, NotInTraceError
from midstream.modeling.vllm.payloads import segments
from tests.conftest import TINY
from tests.modeling.vllm.conftest import Neighbour, plain_tokens
from tests.modeling.vllm.test_state import modes
from tests.support.checkpoints import A, B, checkpoint

SETTINGS: dict[str, Any] = {"temperature": 0.0, "max_tokens": 4}


def left(model: Any) -> list[str]:
    """Shared memory that nobody has received."""
    return segments.remaining(model._engine._owner)


def test_a_full_shared_memory_folder(serving: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What does not fit there comes home another way, whole."""

    def full(*args: Any) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwritev", full)
    expected = plain_tokens(serving, B, max_tokens=8)
    neighbour = Neighbour(serving, B, max_tokens=8)
    with serving.trace(A, **SETTINGS):
        rows = serving.model.layers[1].output[0].save()
        large = rows[0].repeat(5000, 1).save()
    assert torch.equal(large[4999], rows[0])
    assert neighbour.tokens() == expected
    assert left(serving) == []


def test_a_save_of_200_megabytes(serving: Any) -> None:
    """It comes home whole; a request beside it generates what it does without."""
    expected = plain_tokens(serving, B, max_tokens=8)
    neighbour = Neighbour(serving, B, max_tokens=8)
    with serving.trace(A, **SETTINGS):
        large = torch.arange(50_000_000, dtype=torch.float32).save()
    assert large.nbytes == 200_000_000
    assert torch.equal(large[::9_999_999], torch.arange(0, 50_000_000, 9_999_999.0))
    assert neighbour.tokens() == expected
    assert left(serving) == []


def test_a_block_that_starts_a_thread(serving: Any) -> None:
    """The thread works on the block's values, and cannot wait for the model; the block can."""

    def block(model: Any, tracer: Any) -> dict[str, Any]:
        rows = model.model.layers[0].output[0]
        found: dict[str, Any] = {}

        def work() -> None:
            found["sum"] = rows.sum(0)
            try:
                model.model.layers[1].output
            except NotInTraceError as error:
                found["refused"] = str(error)

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        threading.Thread(target=time.sleep, args=(0.5,)).start()  # outlives the block
        return {**found, "rows": rows, "logits": model.logits}

    saves = serving.trace(A, block=block, **SETTINGS).saves
    assert torch.allclose(saves["sum"], saves["rows"].sum(0))
    assert "outside a running block" in saves["refused"]
    assert saves["logits"].shape == (1, 128)


def test_a_block_that_is_abandoned_leaves_no_modes_open() -> None:
    """A block that does not let go is left in the middle of what it has switched on."""
    path = str(checkpoint("T-LLAMA", with_tokenizer=True))
    before = modes()
    with VLLM(path, block_timeout=0.3, **TINY) as model:
        model.dispatch()
        expected = plain_tokens(model, A, max_tokens=4)
        with (
            pytest.raises(InterventionError, match="block_timeout"),
            model.trace(A, **SETTINGS) as tracer,
        ):
            with torch.device("meta"), torch.enable_grad(), torch.autocast("cpu"):
                torch.manual_seed(5)
                model.model.norm(torch.ones(1, 128, device="cpu"))
                hold_on()
        assert modes() == before
        assert tracer.result.outputs[0].finish_reason == "error"
        assert plain_tokens(model, A, max_tokens=4) == expected
        assert model.stats().live_blocks == 0


def hold_on() -> None:
    """Never let go."""
    while True:
        try:
            while True:
                pass
        except BaseException:  # noqa: BLE001
            pass


def test_files_of_a_block(serving: Any, tmp_path: Path) -> None:
    """A block may write files, and an error of the system in it is its own."""
    with serving.trace(A, **SETTINGS):
        torch.save(serving.model.layers[1].output[0], tmp_path / "rows.pt")
    assert torch.load(tmp_path / "rows.pt").shape == (5, 128)
    with pytest.raises(InterventionError, match="^FileNotFoundError"), serving.trace(A, **SETTINGS):
        (tmp_path / "no" / "such" / "file").read_text()
