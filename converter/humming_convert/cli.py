"""The command line. Options become one frozen object; errors become text and exit code 1.

Nothing heavier than Click is imported before a command runs, so that `--help` answers at once.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import traceback
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import click

from humming_convert import cli_convert, cli_kernels, interrupts
from humming_convert.activation import DESCRIPTIONS, NAMES
from humming_convert.cli_convert import Source
from humming_convert.errors import ConvertError, OutputError, is_out_of_memory
from humming_convert.hub_id import HubId
from humming_loader._version import __version__
from humming_loader.errors import LoaderError
from humming_loader.slicing import LARGEST_TP

TRACEBACK = "HUMMING_CONVERT_TRACEBACK"

Params = ParamSpec("Params")
Value = TypeVar("Value")


class DefaultToConvert(click.Group):
    """A group whose default command is `convert`: `humming-convert SRC OUT` needs no command name."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        own = {"--help", "-h", "--version"}
        if args and args[0] not in own and args[0] not in self.commands:
            args = ["convert", *args]
        return super().parse_args(ctx, args)


def reports_errors(command: Callable[Params, Value]) -> Callable[Params, Value]:
    """Print what went wrong, one problem a line, and leave with exit code 1 and no traceback.

    A signal leaves with 128 + its number. With HUMMING_CONVERT_TRACEBACK=1 the traceback is printed too.
    """

    @wraps(command)
    def run(*args: Params.args, **kwargs: Params.kwargs) -> Value:
        try:
            with interrupts.raising():
                return command(*args, **kwargs)
        except (interrupts.Interrupted, KeyboardInterrupt) as error:
            code = error.exit_code if isinstance(error, interrupts.Interrupted) else 130
            raise SystemExit(_fail("interrupted; nothing that looks whole was left behind", code)) from None
        except Exception as error:
            if os.environ.get(TRACEBACK):
                traceback.print_exc()
            raise SystemExit(_fail(_described(error))) from None

    return run


def _described(error: Exception) -> str:
    if isinstance(error, ConvertError | LoaderError):
        return str(error)
    if is_out_of_memory(error):
        return "out of memory; --workers 1 needs the least"
    if isinstance(error, OSError):
        return f"{error.filename}: {error.strerror}" if error.filename else str(error)
    # Whatever gets here is a fault of this program, or an installation that lacks something.
    words = f"internal: {type(error).__name__}: {error}".splitlines()[0]
    return f"{words} (please report; {TRACEBACK}=1 shows where)"


def _fail(text: str, code: int = 1) -> int:
    lines = text.splitlines() or ["unknown error"]
    click.echo("error: " + lines[0], err=True)
    for line in lines[1:]:
        click.echo("       " + line, err=True)
    return code


@click.group(cls=DefaultToConvert, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="humming-convert")
def main() -> None:
    """Convert quantized MoE checkpoints once, offline, into the layout that Humming's kernels read.

    `humming-convert SRC OUT` is short for `humming-convert convert SRC OUT`.
    """


@main.command()
@click.argument("source", metavar="SRC", type=Source())
@click.option("--activation", type=click.Choice(NAMES), default="a16", show_default=True)
@click.option("--dtype", type=click.Choice(["bfloat16", "float16"]))
@click.option("--quant-config", type=click.Path(path_type=Path))
@click.option("--tp", type=click.IntRange(1, LARGEST_TP), default=1, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@reports_errors
def plan(
    source: Path | HubId, activation: str, dtype: str | None, quant_config: Path | None, tp: int, as_json: bool
) -> None:
    """Show what would be converted and what passed through, from headers alone."""
    from humming_convert.plan_build import build_plan
    from humming_convert.report import plan_as_json, plan_as_text
    from humming_convert.source import open_checkpoint

    gc.disable()  # hundreds of thousands of headers that live until the process ends
    checkpoint = open_checkpoint(source, quant_config)
    found = build_plan(checkpoint, activation=activation, dtype=dtype, tp_size=tp)
    click.echo(json.dumps(plan_as_json(found, checkpoint), indent=1) if as_json else plan_as_text(found, checkpoint))


@main.command()
@click.argument("path", metavar="OUT_OR_FILE", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@reports_errors
def inspect(path: Path, as_json: bool) -> None:
    """Show what an output folder, or one experts file, holds."""
    with interrupts.held_back():
        from humming_convert.inspection import inspect_as_json, inspect_as_text

    click.echo(json.dumps(inspect_as_json(path), indent=1) if as_json else inspect_as_text(path))


@main.command()
@click.argument("out", metavar="OUT", type=click.Path(path_type=Path))
@click.option(
    "--source",
    metavar="SRC",
    type=Source(),
    help="Compare with the checkpoint it was made from.",
)
@click.option(
    "--quant-config",
    type=click.Path(path_type=Path),
    help="With --source: the JSON file that was given to convert.",
)
@reports_errors
def verify(out: Path, source: Path | HubId | None, quant_config: Path | None) -> None:
    """Check OUT against its manifest, and with --source against the checkpoint, value by value."""
    with interrupts.held_back():
        from humming_convert.progress import byte_progress
        from humming_convert.verify import verify as verify_output

    if not out.is_dir():
        raise OutputError(f"{out}: expected a folder that humming-convert wrote, found none")
    with byte_progress("verifying") as progress:
        report = verify_output(out, source, quant_config=quant_config, progress=progress)
    click.echo(report.text())


@main.command()
@click.argument("out", metavar="OUT", type=click.Path(path_type=Path))
@click.argument("repo", metavar="ORG/NAME")
@click.option("--private", is_flag=True, help="Make a private repository, if it has to be made.")
@click.option("--revision", metavar="BRANCH", help="Push to this branch.  [default: main]")
@click.option("--create-pr", is_flag=True, help="Open a pull request instead of changing the branch.")
@click.option("--dry-run", is_flag=True, help="Check everything, say what would be sent, and send nothing.")
@reports_errors
def push(out: Path, repo: str, **given: Any) -> None:  # noqa: ANN401 - Click's own values
    """Publish OUT on the Hub, in one commit. Run again after a failure, it sends only what is missing."""
    with interrupts.held_back():
        from humming_convert.progress import byte_progress
        from humming_convert.publish import push as push_output
        from humming_convert.resolve import push_options

    with byte_progress("checking") as progress:
        report = push_output(out, push_options(repo, **given), progress)
    click.echo(report.text())


@main.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@reports_errors
def formats(as_json: bool) -> None:
    """List the model families and checkpoint formats that are supported."""
    from humming_convert.report import support_as_json, support_as_text

    click.echo(json.dumps(support_as_json(), indent=1) if as_json else support_as_text())


@main.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@reports_errors
def targets(as_json: bool) -> None:
    """List the GPU architectures and activations that can be converted for."""
    from humming_convert.target import SM_NAMES

    if as_json:
        rows = {"targets": {f"sm{sm}": name for sm, name in SM_NAMES.items()}, "activations": DESCRIPTIONS}
        click.echo(json.dumps(rows, indent=1))
        return
    for sm, name in SM_NAMES.items():
        click.echo(f"sm{sm:<5} {name}")
    click.echo()
    for name, note in DESCRIPTIONS.items():
        click.echo(f"{name:<12} {note}")


cli_convert.add_to(main, reports_errors)
cli_kernels.add_to(main, reports_errors)

if __name__ == "__main__":
    sys.exit(main())
