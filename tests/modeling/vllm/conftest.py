"""What tests of traces share: HuggingFace's answers, and a look into the engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from midstream.modeling.vllm import bootstrap
from tests.support.checkpoints import checkpoint
from tests.support.oracle import Oracle

# The oracle's HuggingFace model imports Triton, which has to be prepared for the engine first.
bootstrap.prepare_process(bootstrap.installed())


@pytest.fixture(scope="session")
def oracle() -> Callable[[str], Oracle]:
    """Give the oracles of the tiny checkpoints by name, each loaded once."""
    return cache(lambda name: Oracle(checkpoint(name, with_tokenizer=True)))


@pytest.fixture(scope="session")
def demo_oracle(demo_path: Path) -> Oracle:
    """The oracle of the demo model."""
    return Oracle(demo_path)


@pytest.fixture(scope="session")
def hf(oracle: Callable[[str], Oracle]) -> Oracle:
    """The oracle of T-LLAMA."""
    return oracle("T-LLAMA")


@pytest.fixture
def nothing_left(llama: Any) -> Iterator[None]:
    """Afterwards the engine on T-LLAMA must hold no block."""
    yield
    assert live(llama) == [0]


@pytest.fixture(scope="session")
def usual_tokens(llama: Any) -> list[int]:
    """What the engine on T-LLAMA generates without a block."""
    return plain_tokens(llama)


@pytest.fixture
def serving(llama: Any, usual_tokens: list[int]) -> Any:
    """The engine on T-LLAMA; afterwards it must hold no block and generate what it always did."""
    yield llama
    assert live(llama) == [0]
    assert plain_tokens(llama) == usual_tokens


def plain_tokens(model: Any, ids: Any = (21, 22, 23), **settings: Any) -> list[int]:
    """Tokens of a request without a block, greedy by default."""
    from vllm import SamplingParams

    params = SamplingParams(**{"temperature": 0.0, "max_tokens": 3, **settings})
    prompt = {"prompt_token_ids": list(ids)}
    (output,) = model.vllm_entrypoint.generate([prompt], params, use_tqdm=False)
    return list(output.outputs[0].token_ids)


def live(model: Any) -> list[int]:
    """How many blocks the workers of the engine hold: one number if it is the same for all."""
    counts: list[int] = model.vllm_entrypoint.collective_rpc("midstream_live")
    return counts[:1] if len(set(counts)) == 1 else counts


class Neighbour:
    """A plain request that runs in the same steps as whatever is traced next.

    Attributes:
        widths: number of rows of each step's embedding, to see that two prompts shared one.
    """

    def __init__(self, model: Any, ids: Sequence[int], **settings: Any):
        from vllm import SamplingParams

        self._engine = model.vllm_entrypoint.llm_engine
        self.widths: list[int] = []
        embedding = model_of(model).get_submodule("model.embed_tokens")
        self._hook = embedding.register_forward_pre_hook(
            lambda _, args: self.widths.append(len(args[0]))
        )
        params = SamplingParams(**{"temperature": 0.0, **settings})
        self._engine.add_request("neighbour", {"prompt_token_ids": list(ids)}, params)

    def tokens(self) -> list[int]:
        """Step the engine until the request is done and return its tokens.

        It has to outlast the trace, which steps the engine for its own request only.
        """
        outputs: list[Any] = []
        while self._engine.has_unfinished_requests():
            outputs += self._engine.step()
        self._hook.remove()
        last = outputs[-1]
        assert last.request_id == "neighbour"
        assert last.finished
        return list(last.outputs[0].token_ids)


def runner_of(model: Any) -> Any:
    """VLLM's model runner in this process."""
    core = model.vllm_entrypoint.llm_engine.engine_core.engine_core
    return core.model_executor.driver_worker.model_runner


def model_of(model: Any) -> Any:
    """The module that vLLM runs in this process."""
    return runner_of(model).model


def line_of(file: str, mark: str) -> int:
    """Number of the line that ends with the comment `mark`."""
    lines = Path(file).read_text().splitlines()
    (found,) = [i for i, line in enumerate(lines, 1) if line.endswith(f"  # {mark}")]
    return found


def place(file: str, mark: str) -> str:
    """How a traceback names that line."""
    return f'File "{file}", line {line_of(file, mark)}'
