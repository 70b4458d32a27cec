"""The flags of `midstream serve`."""

from __future__ import annotations

from typing import Any

import pytest

from midstream.errors import UnsupportedError
from midstream.serve import flags
from midstream.serve.access import NOBODY
from tests.support.checkpoints import checkpoint

pytest.importorskip("vllm")


def settled(*arguments: str) -> Any:
    """Flags as the server settles them."""
    args = flags.parse(["some/model", *arguments])  # which is not looked for
    flags.settle(args, flags.access(args, {}))
    return args


def test_it_listens_on_this_machine_only() -> None:
    """Without a key nobody else reaches it, whatever vLLM's default is (E13)."""
    assert settled().host == "127.0.0.1"
    assert settled("--uds", "/run/x.sock").uds == "/run/x.sock"
    assert settled("--host", "0.0.0.0", "--api-key", "k").host == "0.0.0.0"
    for host in ("0.0.0.0", "::", "10.0.0.1", "example.org"):
        with pytest.raises(UnsupportedError, match="--api-key"):
            settled("--host", host)


def test_where_keys_come_from() -> None:
    """Flags before the environment; an administrator's key is a key."""
    args = flags.parse(["m", "--api-key", "a", "b", "--admin-key", "r"])
    access = flags.access(args, {"VLLM_API_KEY": "never"})
    assert args.api_key == ["a", "b", "r"]
    found = {key: access.owner(f"Bearer {key}")[0] for key in ("a", "b", "r", "never")}
    assert found["never"] is None
    assert [found[key].admin for key in ("a", "b", "r")] == [False, False, True]
    assert len({found[key].id for key in ("a", "b", "r")}) == 3
    args = flags.parse(["m"])
    access = flags.access(args, {"VLLM_API_KEY": "v", "MIDSTREAM_ADMIN_KEY": "r"})
    assert access.owner("Bearer v")[0].admin is False
    assert access.owner("Bearer r")[0].admin is True
    assert flags.access(flags.parse(["m"]), {}).owner("")[0] == NOBODY


@pytest.mark.parametrize(
    "arguments",
    [
        ("--headless",),
        ("--api-server-count", "2"),
    ],
)
def test_what_a_server_with_blocks_cannot_do(arguments: tuple[str, ...]) -> None:
    """It is refused with what to do instead (O21)."""
    with pytest.raises(UnsupportedError, match="not supported"):
        settled(*arguments)


def test_routes_past_the_guard_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """VLLM's development routes call workers directly."""
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "1")
    with pytest.raises(UnsupportedError, match="VLLM_SERVER_DEV_MODE"):
        settled()


def test_engine_arguments_are_vllms() -> None:
    """What was given reaches the engine, what was not does not; our limits are among it (E14)."""
    model = str(checkpoint("T-LLAMA", with_tokenizer=True))
    args = flags.parse(
        [
            model,
            "--dtype",
            "float32",
            "--max-model-len",
            "64",
            "--enable-lora",
            "--block-timeout",
            "5",
        ]
    )
    found = flags.engine_arguments(args)
    assert found["dtype"] == "float32"
    assert found["max_model_len"] == 64
    assert found["enable_lora"] is True
    assert found["block_timeout"] == 5.0
    assert found["disable_log_stats"] is False
    assert "tensor_parallel_size" not in found
    assert "model" not in found
    assert found["taps"] == []
    args = flags.parse([model, "--taps", "model.layers.*.output", "model.norm.input"])
    assert flags.engine_arguments(args)["taps"] == ["model.layers.*.output", "model.norm.input"]


def test_bounds() -> None:
    """They are numbers above zero."""
    found = flags.bounds(flags.parse(["m", "--max-traces-per-key", "3", "--no-code"]))
    assert found.most_traces == 3
    assert found.code is False
    with pytest.raises(ValueError, match="--max-body-bytes 0"):
        flags.bounds(flags.parse(["m", "--max-body-bytes", "0"]))


def test_a_flag_that_nobody_knows(capsys: Any) -> None:
    """It is refused as vLLM's own are (E15, G62)."""
    with pytest.raises(SystemExit):
        flags.parse(["m", "--no-codes"])
    assert "--no-codes" in capsys.readouterr().err


def test_other_plugins_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Naming our plugin leaves those allowed before, or all there were, as they are."""
    assert flags.allowed_plugins(["ours"], "a,b") == "a,b,ours"
    assert flags.allowed_plugins(["ours"], None).split(",")[-1] == "ours"
