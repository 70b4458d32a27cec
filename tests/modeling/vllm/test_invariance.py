"""`batch_invariant=True`: which kernels an engine's process has is settled when it starts."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest

from midstream import VLLM
from midstream.errors import UnsupportedError
from midstream.modeling.vllm import bootstrap
from midstream.modeling.vllm.bootstrap import Installed, environment, process_variables
from tests.support.checkpoints import checkpoint

GPU = Installed("0.32.0", cpu=False)
ATTENTION = "vllm.v1.attention.ops.triton_unified_attention"


@pytest.fixture
def own_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines in processes of their own."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    monkeypatch.delenv("VLLM_BATCH_INVARIANT", raising=False)
    monkeypatch.delenv("VLLM_WORKER_MULTIPROC_METHOD", raising=False)
    for name in bootstrap._DECIDED_AT_IMPORT:
        monkeypatch.delitem(sys.modules, name, raising=False)


def test_a_cpu_has_no_such_kernels() -> None:
    """The model is refused where it is made, whether or not its engine is built."""
    with pytest.raises(UnsupportedError, match="batch_invariant=True .* CPU.*Leave it out"):
        VLLM(str(checkpoint("T-LLAMA", with_tokenizer=True)), batch_invariant=True)


@pytest.mark.usefixtures("own_processes")
def test_only_the_engines_processes_get_it() -> None:
    """Another engine's, and the caller's own, are left as they are."""
    assert "VLLM_BATCH_INVARIANT" not in process_variables(GPU)
    variables = process_variables(GPU, invariant=True)
    assert variables["VLLM_BATCH_INVARIANT"] == "1"
    with environment(variables):
        assert os.environ["VLLM_BATCH_INVARIANT"] == "1"
        os.environ["VLLM_USE_BREAKABLE_CUDAGRAPH"] = "1"  # as vLLM does meanwhile
    assert "VLLM_BATCH_INVARIANT" not in os.environ
    assert "VLLM_USE_BREAKABLE_CUDAGRAPH" not in os.environ


@pytest.mark.usefixtures("own_processes")
@pytest.mark.parametrize("decided", [True, False])
def test_a_fork_does_not_take_over_the_callers_choice(
    decided: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Modules that looked before the engine was asked for would keep what they saw in a fork."""
    monkeypatch.setitem(sys.modules, ATTENTION, SimpleNamespace(is_batch_invariant=decided))
    start = process_variables(GPU, invariant=True).get("VLLM_WORKER_MULTIPROC_METHOD")
    assert start == (None if decided else "spawn")
    assert "VLLM_WORKER_MULTIPROC_METHOD" not in process_variables(GPU)


def test_engines_in_one_process_are_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second one that differs is refused; vLLM's own variable counts too."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    monkeypatch.delenv("VLLM_BATCH_INVARIANT", raising=False)
    for first in (True, False):
        monkeypatch.setattr(bootstrap, "_in_this_process", [])
        process_variables(GPU, invariant=first)
        process_variables(GPU, invariant=first)
        with pytest.raises(UnsupportedError, match=f"batch_invariant={not first} differs"):
            process_variables(GPU, invariant=not first)
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    with pytest.raises(UnsupportedError, match="batch_invariant=True differs"):
        process_variables(GPU)


def test_vllm_still_decides_there() -> None:
    """The modules that look when they are imported are those of the installed vLLM."""
    for name in bootstrap._DECIDED_AT_IMPORT:
        spec = find_spec(name)
        assert spec is not None
        assert spec.origin is not None
        assert "\nis_batch_invariant = envs.VLLM_BATCH_INVARIANT\n" in Path(spec.origin).read_text()
