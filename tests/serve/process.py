"""A server as users start it: `midstream serve` in a process of its own."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any

import httpx
import psutil

from tests.modeling.vllm.scripts.running import ROOT, _environment, _killable, gone
from tests.support.checkpoints import checkpoint

FLAGS = (
    *("--dtype", "float32", "--max-model-len", "512", "--block-size", "32"),
    *("--max-num-seqs", "32", "--kv-cache-memory-bytes", str(1 << 28)),
    *("--served-model-name", "tiny"),
)
TEMPLATE = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
"""A chat template: what is said, and nothing else."""

_THREADS = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}


def command(*arguments: str) -> list[str]:
    """`midstream` with arguments, from this tree."""
    return [sys.executable, "-m", "midstream.cli", *arguments]


def environment(more: Mapping[str, str]) -> dict[str, str]:
    """The environment of a server."""
    found = _environment(())
    source = os.pathsep.join([str(ROOT / "src"), found["PYTHONPATH"]])
    return {**found, **_THREADS, "PYTHONPATH": source, **more}


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


class Server:
    """A server, of T-LLAMA by default.

    Args:
        more: flags beside ``flags``.
        model: another checkpoint.
        flags: what it is started with.
        variables: of its environment.

    Attributes:
        url: its address.
    """

    def __init__(self, *more: str, model: str = "", flags: Sequence[str] = FLAGS, **variables: str):
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed with the server
        port = free_port()
        self.url = f"http{'s' * ('--ssl-keyfile' in more)}://127.0.0.1:{port}"
        model = model or str(checkpoint("T-LLAMA", with_tokenizer=True))
        self.process = subprocess.Popen(
            command("serve", model, "--port", str(port), *flags, *more),
            stdout=self._log,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            env=environment(variables),
            start_new_session=True,
        )

    def wait(self, seconds: float = 180.0) -> Server:
        """Wait until it answers.

        Raises:
            AssertionError: it ended, or did not come up in time.
        """
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and self.process.poll() is None:
            try:
                if httpx.get(f"{self.url}/health", timeout=5).is_success:
                    return self
            except httpx.HTTPError:
                time.sleep(0.2)
        raise AssertionError(f"The server did not come up.\n{self.log()}")

    def log(self) -> str:
        """The last of what it printed."""
        self._log.seek(0)
        return self._log.read()[-6000:]

    def below(self) -> list[int]:
        """Ids of the processes that it has started."""
        return [each.pid for each in psutil.Process(self.process.pid).children(recursive=True)]

    def memory(self) -> int:
        """Bytes that the server's own process holds."""
        return int(psutil.Process(self.process.pid).memory_info().rss)

    def terminate(self) -> None:
        """Tell it to end, as a service manager does."""
        self.process.send_signal(signal.SIGTERM)

    def end(self) -> None:
        """Kill it and all that it has started."""
        for process in _killable(self.process.pid):
            process.kill()
        self.process.wait(30)
        self._log.close()


def ended(pids: list[int], seconds: float) -> bool:
    """Whether processes have ended in that time."""
    return gone(pids, seconds)


def json_call(url: str, method: str, path: str, key: str | None = None, **more: Any) -> Any:
    """One request to a server; the answer, whatever it is."""
    headers = {**more.pop("headers", {})}
    if key is not None:
        headers["Authorization"] = f"Bearer {key}"
    return httpx.request(method, url + path, headers=headers, timeout=120, **more)
