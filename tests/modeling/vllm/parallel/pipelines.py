"""An engine on two pipeline stages, which tests share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.conftest import TINY
from tests.modeling.vllm.conftest import plain_tokens
from tests.support.checkpoints import checkpoint


@contextmanager
def pipeline(name: str = "T-LLAMA", **settings: Any) -> Iterator[Any]:
    """An engine of two pipeline stages, a process each, on one core each."""
    from midstream import VLLM

    path = str(checkpoint(name, with_tokenizer=True))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
        settings = {**TINY, "max_num_seqs": 32, **settings}
        model = VLLM(path, pipeline_parallel_size=2, dispatch=True, **settings)
    with model:  # other tests' engines find the environment as it was
        yield model


@pytest.fixture(scope="package")
def pipe() -> Iterator[Any]:
    """T-LLAMA on two stages: layers 0 and 1 on the first, 2, 3 and the head on the second."""
    with pipeline(block_timeout=2.0) as model:
        yield model


@pytest.fixture
def pipe_as_before(pipe: Any) -> Iterator[None]:
    """Afterwards the engine must hold no block and generate what it did."""
    before = plain_tokens(pipe)
    yield
    assert plain_tokens(pipe) == before  # also a step in which finished requests are let go
    assert pipe.vllm_entrypoint.collective_rpc("midstream_live") == [0, 0]
