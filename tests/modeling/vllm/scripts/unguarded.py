"""Builds an engine without `if __name__ == "__main__"`, and says each time it is run."""

from __future__ import annotations

import time

from midstream import VLLM
from midstream.errors import EngineBuildError
from tests.modeling.vllm.scripts.reporting import TINY, engine_processes, reported
from tests.support.checkpoints import checkpoint

with reported(f"run_{time.monotonic_ns()}"):
    pass
start = time.monotonic()
try:
    model = VLLM(str(checkpoint("T-LLAMA", with_tokenizer=True)), dispatch=True, **TINY)
except EngineBuildError as error:
    if __name__ == "__main__":
        with reported("refused") as facts:
            facts["after"] = time.monotonic() - start
            facts["text"] = str(error)
            facts["processes"] = [str(process) for process in engine_processes()]
    raise
