"""Forks a process the way vLLM does where CUDA is not initialised; the test kills this one."""

from __future__ import annotations

import multiprocessing
import time

from midstream.modeling.vllm.bootstrap import environment
from midstream.modeling.vllm.building import process
from midstream.modeling.vllm.payloads.segments import owner_id
from tests.modeling.vllm.scripts.reporting import engine_processes, reported

if __name__ == "__main__":
    with environment({process.CLIENT: owner_id()}):
        multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,)).start()
    with reported("forked") as facts:
        facts["processes"] = [child.pid for child in engine_processes()]
    time.sleep(600)
