"""The command `kernels`. Like `cli`, it imports nothing heavier than Click before it runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from humming_convert import interrupts


def numbers(ctx: click.Context, param: click.Parameter, value: str) -> tuple[int, ...]:
    """`1,2,4` as numbers, each once and at least 1; nothing: none. Raises click.BadParameter."""
    parts = [part.strip() for part in value.split(",") if part.strip()]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise click.BadParameter(f"expected numbers such as 1,2,4, found {value!r}", ctx, param)
    return tuple(dict.fromkeys(int(part) for part in parts))


@click.argument("out", metavar="OUT", type=click.Path(path_type=Path))
@click.option("--target", default=None, help="GPU architecture, smNN; none but OUT's can be.  [default: OUT's]")
@click.option("--device-name", default=None, help='The GPU that will serve, such as "NVIDIA H200".')
@click.option("--device-facts", type=click.Path(path_type=Path), help="A JSON file about a GPU that is not known.")
@click.option("--gemm-type", default="", help="Of indexed,grouped,grouped_masked.  [default: as vLLM chooses]")
@click.option("--tp", callback=numbers, default="", help="Tensor-parallel sizes to serve with.  [default: OUT's, or 1]")
@click.option("--ep", callback=numbers, default="", help="Expert-parallel sizes to serve with.")
@click.option("--top-k", type=click.IntRange(1), help="Experts of a token.  [default: config.json's]")
@click.option("--workers", type=click.IntRange(1, 256), help="Kernels compiled at once.  [default: processors]")
def kernels(
    out: Path,
    target: str | None,
    device_name: str | None,
    device_facts: Path | None,
    gemm_type: str,
    tp: tuple[int, ...],
    ep: tuple[int, ...],
    top_k: int | None,
    workers: int | None,
) -> None:
    """Compile the kernels that serving OUT can ask for, without a GPU, into OUT/humming/kernels.

    Needs CUDA's compiler as wheels: pip install 'humming-convert[kernels]'.
    """
    with interrupts.held_back():
        from humming_convert.kernels import KernelOptions, build_kernels, parse_gemm_types
        from humming_convert.options import default_workers
        from humming_convert.target import Target, parse_sm

        options = KernelOptions(
            device_name=device_name,
            device_facts=device_facts,
            gemm_types=parse_gemm_types(gemm_type),
            tp_sizes=tp or (() if ep else None),
            ep_sizes=ep,
            top_k=top_k,
            workers=workers or default_workers(),
        )
    click.echo(build_kernels(out, options, Target(parse_sm(target)) if target else None).text())


def add_to(group: click.Group, reports_errors: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Make it a command of `group`, with errors reported as `reports_errors` does."""
    group.command("kernels")(reports_errors(kernels))
