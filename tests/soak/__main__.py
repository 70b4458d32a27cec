"""`python -m tests.soak --seed 3 --count 2000 --async-scheduling on`."""

from __future__ import annotations

import argparse
import os
import time

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")

from tests.soak.engines import engine
from tests.soak.running import Soak, draws


def main() -> int:
    """Run the soak; the exit status is 1 if a result differed."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--async-scheduling", choices=["on", "off"], default="off")
    parser.add_argument("--tapped", action="store_true", help="record steps, as graphs do")
    given = parser.parse_args()
    began = time.monotonic()
    with engine(asynchronous=given.async_scheduling == "on", tapped=given.tapped) as model:
        soak = Soak(model)
        soak.run(draws(given.seed, given.count))
        steps = dict(model.stats().steps)
    for text in soak.differences:
        print("DIFFERS", text)
    print(
        f"{sum(soak.kinds.values())} requests of {len(soak.kinds)} kinds in "
        f"{time.monotonic() - began:.0f} s, {soak.preempted} preemptions, "
        f"{soak.counts.pieces} prompts in pieces, {len(soak.differences)} differences, "
        f"steps {steps}"
    )
    return 1 if soak.differences else 0


raise SystemExit(main())
