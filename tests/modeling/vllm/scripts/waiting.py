"""An engine process that began to wait just as it was asked to end, and did not notice."""

from __future__ import annotations

import os
import signal
import threading
import time

from midstream.modeling.vllm.bootstrap import environment
from midstream.modeling.vllm.engine import process
from midstream.modeling.vllm.payloads.segments import owner_id
from tests.modeling.vllm.scripts.reporting import reported


def announce() -> None:
    """Say so once the main thread surely waits, then live on to receive the signal."""
    time.sleep(1)
    with reported("waits"):
        pass
    time.sleep(600)


if __name__ == "__main__":
    with environment({process.CLIENT: owner_id(os.getppid())}):
        process.enter()
    signal.signal(signal.SIGTERM, lambda number, frame: os._exit(0))
    # The signal reaches another thread, so nothing interrupts the main thread's wait.
    threading.Thread(target=announce, daemon=True).start()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()
