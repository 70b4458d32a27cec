"""`midstream serve --taps`: what the server says of them, and what its clients meet."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from midstream import VLLM
from midstream.errors import InterventionError, OutOfOrderError
from tests.serve.process import FLAGS, Server, command, environment, json_call
from tests.support.checkpoints import checkpoint

TAPS = ("model.layers.*.output", "model.layers.0.mlp.input")
FULL = (*(f"model.model.layers.{i}.output" for i in range(4)), "model.model.layers.0.mlp.input")
SETTINGS: dict[str, Any] = {"temperature": 0.0, "max_tokens": 3, "ignore_eos": True}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A server with declared taps and no keys."""
    made = Server("--taps", *TAPS)
    try:
        yield made.wait().url
    finally:
        made.end()


def test_clients_of_a_server_with_taps(url: str) -> None:
    """They see what is declared, read it, and get the error of what is not, at their line.

    (D2, D3, G35).
    """
    about = json_call(url, "GET", "/v1/midstream/model").json()
    assert about["taps"] == list(FULL)
    model: Any = VLLM("tiny", serve=url)
    assert model.taps == FULL
    with model.trace([3, 4, 5], **SETTINGS) as tracer:
        rows = [].save()
        for _ in tracer.all():
            model.model.layers[0].mlp.input
            rows.append(sum(model.model.layers[2].output))
    assert [len(row) for row in rows] == [3, 1, 1]
    with pytest.raises(InterventionError) as failure:
        with model.trace([3, 4, 5], **SETTINGS):
            model.model.layers[0].mlp.output
    assert isinstance(failure.value.__cause__, OutOfOrderError)
    assert "taps=[..., 'model.layers.0.mlp.output']" in str(failure.value)
    assert __file__ in str(failure.value)
    model.close()


def test_a_wrong_tap_ends_the_command() -> None:
    """The server does not start, and says which tap names nothing (A37, G1)."""
    path = str(checkpoint("T-LLAMA", with_tokenizer=True))
    ended = subprocess.run(
        command("serve", path, "--port", "1", *FLAGS, "--taps", "model.layers.*.mpl.output"),
        capture_output=True, text=True, env=environment({}), timeout=180, check=False,
    )  # fmt: skip
    assert ended.returncode == 1
    said = re.sub(r"\s+", " ", ended.stderr)
    assert "error: taps: 'model.layers.*.mpl.output': it names no module of this model." in said
    assert "Near it: 'model.layers.*.mlp.output'" in said
