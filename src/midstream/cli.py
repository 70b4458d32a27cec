"""The command line: ``midstream serve``, ``midstream demo-model`` and ``midstream doctor``.

Nothing here but ``serve`` imports torch, transformers or vLLM: a command answers at once, and what
must be imported to be checked is imported by a child process.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

__all__ = ["app"]

app = typer.Typer(
    help="midstream: read and edit a language model mid-forward, while vLLM serves it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,  # a server's log is read by programs
)


@app.command("demo-model")
def demo_model(
    folder: Annotated[
        Path | None,
        typer.Argument(metavar="[DIR]", help="New or empty folder; the user's cache by default."),
    ] = None,
) -> None:
    """Prepare the demo model (SmolLM2-135M-Instruct) once and print its folder."""
    from midstream import demo

    notes = Console(stderr=True)  # the path alone goes to stdout: `model=$(midstream demo-model)`
    try:
        path = demo.demo_model(folder, progress=lambda text: notes.print(escape(text), style="dim"))
    except (ModuleNotFoundError, OSError) as error:
        notes.print(f"[red]error:[/red] {escape(str(error))}", highlight=False, soft_wrap=True)
        raise typer.Exit(1) from error
    typer.echo(path)


@app.command(
    context_settings={
        "allow_extra_args": True,
        "ignore_unknown_options": True,
        "help_option_names": [],  # vLLM's parser, which knows the flags, answers `--help`
    }
)
def serve(context: typer.Context) -> None:
    """Serve a model: `midstream serve MODEL [flags of vllm serve]`; `--help` lists the flags."""
    from midstream.errors import MidstreamError

    try:
        from midstream.serve.server import main

        main(context.args)
    except (MidstreamError, ModuleNotFoundError, ValueError) as error:
        notes = Console(stderr=True)
        notes.print(f"[red]error:[/red] {escape(str(error))}", highlight=False, soft_wrap=True)
        raise typer.Exit(1) from error


@app.command()
def doctor() -> None:
    """Show versions, device and model runner, and say what is missing and how to get it."""
    from midstream.doctor import Level, examine, table

    notes = Console(stderr=True)
    with notes.status("Importing torch, transformers and vLLM in a child process ..."):
        findings = examine()
    Console().print(table(findings))
    problems = [finding for finding in findings if finding.level is Level.PROBLEM]
    if problems:
        Console().print(f"{len(problems)} blocking: " + ", ".join(f.subject for f in problems))
        raise typer.Exit(1)
    Console().print("Nothing blocking found.")


if __name__ == "__main__":
    app()
