"""The OpenAPI description is true: schemathesis asks what it allows, and what it forbids."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable

import httpx
import pytest

from tests.modeling.vllm.scripts.running import ROOT as TREE
from tests.serve.conftest import ALICE, ROOT
from tests.serve.process import Server

RUN = shutil.which("schemathesis")
CHECKS = (
    *("not_a_server_error", "status_code_conformance", "content_type_conformance"),
    *("response_headers_conformance", "response_schema_conformance", "negative_data_rejection"),
    *("positive_data_acceptance", "missing_required_header", "unsupported_method"),
    *("allow_header_conformance", "ignored_auth", "use_after_free"),
)

Ask = Callable[..., httpx.Response]


@pytest.mark.skipif(RUN is None, reason="schemathesis is not installed")
def test_schemathesis(server: Server, ask: Ask) -> None:
    """What the description allows is answered as it says, and what it forbids is refused."""
    body = {"name": "described", "code": "seen = [1].save()"}
    assert ask("POST", "/v1/midstream/edits", ROOT, json=body).is_success
    command = [
        *(str(RUN), "run", f"{server.url}/openapi.json", "--include-path-regex", "^/v1/midstream"),
        *("--header", f"Authorization: Bearer {ALICE}", "--checks", ",".join(CHECKS)),
        *("--phases", "coverage,fuzzing", "--max-examples", "5", "--seed", "1", "--workers", "2"),
        *("--continue-on-failure", "--generation-deterministic", "--request-timeout", "60"),
        "--no-color",
    ]
    variables = {
        **os.environ,
        "PYTHONPATH": str(TREE),
        "SCHEMATHESIS_HOOKS": "tests.serve.described",
    }
    try:
        ran = subprocess.run(
            command, capture_output=True, text=True, timeout=300, env=variables, check=False
        )
    finally:
        ask("DELETE", "/v1/midstream/edits", ROOT)
    assert ran.returncode == 0, ran.stdout[-8000:] + ran.stderr[-2000:]
