"""The command `convert`. Like `cli`, it imports nothing heavier than Click before it runs."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from humming_convert import interrupts
from humming_convert.activation import NAMES
from humming_convert.errors import OutputError
from humming_convert.hub_id import HubId, parse_source
from humming_loader.slicing import LARGEST_TP


class Source(click.ParamType):  # type: ignore[type-arg] # generic in newer versions of Click only
    """A path, or `ORG/NAME[@REVISION]` of the Hub."""

    name = "source"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path | HubId:  # noqa: ANN401
        """What the text names; nothing is looked up on the Hub yet."""
        return parse_source(value) if isinstance(value, str) else value


@click.argument("source", metavar="SRC", type=Source())
@click.argument("out", metavar="OUT", type=click.Path(path_type=Path))
@click.option(
    "--target",
    default="auto",
    show_default=True,
    help="GPU architecture, smNN; auto: this machine's, or sm90.",
)
@click.option("--cuda", default=None, help="CUDA compiler version where it will be served.  [default: 13.0]")
@click.option(
    "--activation",
    type=click.Choice(NAMES),
    default="a16",
    show_default=True,
    help="What the kernels multiply with; checkpoint: what the checkpoint says.",
)
@click.option(
    "--dtype",
    type=click.Choice(["bfloat16", "float16"]),
    help="Parameter dtype.  [default: the checkpoint's]",
)
@click.option("--device", default="auto", show_default=True, help="Where to convert: auto, cpu, cuda or cuda:i.")
@click.option(
    "--quant-config",
    type=click.Path(path_type=Path),
    help="A JSON file used in place of the checkpoint's own.",
)
@click.option("--max-shard-size", default="5GB", show_default=True, help="Largest file of passed-through tensors.")
@click.option("--overwrite", is_flag=True, help="Replace OUT if it is an earlier output.")
@click.option("--workers", type=click.IntRange(1, 256), help="Slices converted at once.  [default: processors]")
@click.option(
    "--hash-source/--no-hash-source",
    default=False,
    show_default=True,
    help="Record the SHA-256 of every source file in the manifest; the source is read once more for it.",
)
@click.option(
    "--tp",
    type=click.IntRange(1, LARGEST_TP),
    default=1,
    show_default=True,
    help="Cut the source for this many tensor-parallel ranks before packing; OUT then serves that size alone.",
)
@click.option("--kernels", is_flag=True, help="Also compile the kernels; see `humming-convert kernels --help`.")
@click.option("--low-disk", is_flag=True, help="Of a repository, keep only the files that layers under way need.")
@click.option("--push", metavar="ORG/NAME", help="Upload every file as soon as it is finished; one commit at the end.")
@click.option("--private", is_flag=True, help="With --push: make a private repository.")
def convert(source: Path | HubId, out: Path, kernels: bool, **given: Any) -> None:  # noqa: ANN401 - Click's own values
    """Convert SRC, a .safetensors file, a model folder or ORG/NAME[@REVISION] of the Hub, into the new folder OUT."""
    gc.disable()  # until the plan is made; see humming_convert.layers
    with interrupts.held_back():
        from humming_convert.pipeline import convert_checkpoint
        from humming_convert.resolve import resolve_options

        options, notes = resolve_options(source, out, **given)  # may import torch
    for note in notes:
        click.echo(note, err=True)
    if kernels:
        from humming_convert.kernels import KernelOptions, build_kernels, check_can_compile

        if options.push is not None:
            raise OutputError("--kernels: made after the output, so not with --push; build them, then use push")
        check_can_compile(options.target)
    report = convert_checkpoint(options)
    click.echo(report.text())
    if kernels:
        click.echo(build_kernels(options.out, KernelOptions(workers=options.workers)).text())


def add_to(group: click.Group, reports_errors: Callable[[Callable[..., None]], Callable[..., None]]) -> None:
    """Make it a command of `group`, its errors reported as those of the others."""
    group.command()(reports_errors(convert))
