"""Builds an engine; the test kills this process while it does."""

from __future__ import annotations

from midstream import VLLM
from tests.modeling.vllm.scripts.reporting import TINY, reported
from tests.support.checkpoints import checkpoint

if __name__ == "__main__":
    model = VLLM(str(checkpoint("T-LLAMA", with_tokenizer=True)), **TINY)
    with reported("begins"):
        pass
    model.dispatch()
    with reported("built"):
        pass
