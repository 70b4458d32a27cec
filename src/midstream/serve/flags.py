"""The flags of `midstream serve`: vLLM's own, and ours beside them."""

from __future__ import annotations

import argparse
import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any

from midstream.errors import UnsupportedError
from midstream.modeling.vllm.limits import Limits
from midstream.serve.access import Access, is_loopback
from midstream.switches import is_on

MIB = 1 << 20
_ADMIN = "MIDSTREAM_ADMIN_KEY"
_DRAIN = 30  # seconds that requests have to end when the server is told to
_PLUGINS = (
    "vllm.general_plugins",
    "vllm.io_processor_plugins",
    "vllm.platform_plugins",
    "vllm.stat_logger_plugins",
)


@dataclasses.dataclass(frozen=True)
class Bounds:
    """What a server takes.

    Attributes:
        most_traces: traces of one key that run, or wait to be fetched.
        most_edits: edits of one key.
        max_body: bytes of a request's body.
        keep_seconds: how long a finished trace waits to be fetched.
        code: whether clients' blocks run; else only edits that an admin key installs.
    """

    most_traces: int = 64
    most_edits: int = 64
    max_body: int = 256 * MIB
    keep_seconds: float = 600.0
    code: bool = True


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The flags of a command line, as `vllm serve` reads it, with ours among them.

    Raises:
        SystemExit: a flag that nobody knows, or `--help`.
    """
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.logger import configure_logging_from_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    command = ServeSubcommand()
    whole = FlexibleArgumentParser(prog="midstream")
    parser = command.subparser_init(whole.add_subparsers(required=True, dest="subparser"))
    parser.usage = "midstream serve [model_tag] [options]"
    parser.set_defaults(shutdown_timeout=_DRAIN)
    _add_ours(parser.add_argument_group("midstream", "Blocks, edits, and who may use them."))
    args: argparse.Namespace = whole.parse_args(["serve", *arguments])
    configure_logging_from_args(args)
    command.validate(args)
    if args.model_tag is not None:
        args.model = args.model_tag
    return args


def _add_ours(group: Any) -> None:
    usual, limits = Bounds(), Limits()
    group.add_argument(
        "--admin-key", nargs="*", default=None,
        help="API keys whose edits act on everyone's requests, and that may clear all edits "
        f"(or {_ADMIN} in the environment).",
    )  # fmt: skip
    group.add_argument(
        "--taps", nargs="*", default=[], metavar="PATTERN",
        help="The only locations that blocks may ask for, such as 'model.layers.*.output'; graphs "
        "are captured for them. All are served without it.",
    )  # fmt: skip
    group.add_argument(
        "--block-timeout", type=float, default=limits.block_timeout,
        help="Seconds that a block may take in one step of its request.",
    )  # fmt: skip
    group.add_argument(
        "--max-save-bytes", type=int, default=limits.max_save_bytes,
        help="Bytes that the saves of one request may have.",
    )  # fmt: skip
    group.add_argument(
        "--max-traces-per-key", type=int, default=usual.most_traces,
        help="Traces of one API key that run, or wait to be fetched.",
    )  # fmt: skip
    group.add_argument(
        "--max-edits-per-key", type=int, default=usual.most_edits,
        help="Edits that one API key may have installed.",
    )  # fmt: skip
    group.add_argument(
        "--max-body-bytes", type=int, default=usual.max_body,
        help="Bytes that the body of a request may have.",
    )  # fmt: skip
    group.add_argument(
        "--no-code", action="store_true",
        help="Run no blocks of clients: only edits, which admin keys alone install.",
    )  # fmt: skip


def bounds(args: argparse.Namespace) -> Bounds:
    """The bounds that the flags set.

    Raises:
        ValueError: one is not above zero.
    """
    for name in ("max_traces_per_key", "max_edits_per_key", "max_body_bytes"):
        if getattr(args, name) < 1:
            flag = name.replace("_", "-")
            raise ValueError(f"--{flag} {getattr(args, name)}: expected a number above zero.")
    return Bounds(
        most_traces=args.max_traces_per_key,
        most_edits=args.max_edits_per_key,
        max_body=args.max_body_bytes,
        code=not args.no_code,
    )


def access(args: argparse.Namespace, environment: Mapping[str, str] = os.environ) -> Access:
    """The keys, from the flags or the environment; vLLM's own check is to know all of them."""
    keys = args.api_key or [environment.get("VLLM_API_KEY", "")]
    admin = args.admin_key or [environment.get(_ADMIN, "")]
    args.api_key = [key for key in (*keys, *admin) if key] or None
    return Access(keys, admin)


def settle(args: argparse.Namespace, keys: Access) -> None:
    """Settle where the server listens; completes the flags in place.

    Raises:
        UnsupportedError: an address that others reach without a key, or a setting that a server
            with blocks cannot work with.
    """
    _refuse(args)
    if args.host is None:
        args.host = "127.0.0.1"
    if keys.open and not args.uds and not is_loopback(args.host):
        raise UnsupportedError(
            f"--host {args.host} without an API key: clients' code runs in the engine, so whoever "
            "reaches the server could run theirs. Set --api-key (or VLLM_API_KEY), or leave "
            "--host out to listen on 127.0.0.1."
        )
    args.middleware = [*args.middleware, "midstream.serve.guard.Guard"]  # the last one is outermost


def _refuse(args: argparse.Namespace) -> None:
    if is_on(os.environ.get("VLLM_SERVER_DEV_MODE", "0")):
        raise UnsupportedError(
            "VLLM_SERVER_DEV_MODE is set: its routes call the engine's workers directly, past all "
            "that keeps clients apart. Unset it."
        )
    if args.headless or (args.api_server_count or 1) > 1:
        raise UnsupportedError(
            "--headless and --api-server-count above 1 are not supported: edits and traces are "
            "kept by one server process. Leave them out."
        )
    if getattr(args, "grpc", False) or is_on(os.environ.get("VLLM_USE_RUST_FRONTEND", "0")):
        raise UnsupportedError(
            "gRPC and the Rust frontend have no midstream routes; leave them out."
        )


def engine_arguments(args: argparse.Namespace) -> dict[str, Any]:
    """What `VLLM(...)` is built with: vLLM's engine arguments that were given, and ours."""
    from vllm.engine.arg_utils import AsyncEngineArgs

    given, usual = AsyncEngineArgs.from_cli_args(args), AsyncEngineArgs(args.model)
    found = {
        field.name: getattr(given, field.name)
        for field in dataclasses.fields(AsyncEngineArgs)
        if getattr(given, field.name) != getattr(usual, field.name)
    }
    found.pop("model", None)
    return {
        **found,
        "disable_log_stats": args.disable_log_stats,  # counted for /metrics
        "block_timeout": args.block_timeout,
        "max_save_bytes": args.max_save_bytes,
        "taps": args.taps,
    }


def allowed_plugins(names: Sequence[str], before: str | None) -> str:
    """What `VLLM_PLUGINS` has to be, so that our plugin is loaded and every other as without it."""
    from importlib.metadata import entry_points

    if before is not None:
        return ",".join([before, *names])
    others = [each.name for group in _PLUGINS for each in entry_points(group=group)]
    return ",".join([*dict.fromkeys(others), *names])
