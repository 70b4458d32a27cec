"""An engine that is told to end while it starts, as by a Ctrl-C that reaches its process."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

from midstream import VLLM
from midstream.errors import EngineBuildError
from midstream.modeling.vllm.engine.scheduler import BlockScheduler
from tests.modeling.vllm.scripts.reporting import TINY, engine_processes, reported
from tests.support.checkpoints import checkpoint


class Interrupted(BlockScheduler):
    """Asks its process to end as it is made, when vLLM has set its answer to that."""

    def __init__(self, *args: Any, **keywords: Any) -> None:
        super().__init__(*args, **keywords)
        os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    with reported("interrupted") as facts:
        try:
            VLLM(
                str(checkpoint("T-LLAMA", with_tokenizer=True)),
                dispatch=True,
                scheduler_cls=Interrupted,
                **TINY,
            )
        except EngineBuildError as error:
            facts["text"] = str(error)
        deadline = time.monotonic() + 10
        while engine_processes() and time.monotonic() < deadline:
            time.sleep(0.1)
        facts["processes"] = [process.pid for process in engine_processes()]
