"""Outputs packed for tensor-parallel ranks: loading, verifying, inspecting, and the command line."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from tests.converter.test_verify import header_of
from tests.support.checkpoints import make_checkpoint
from tests.support.plans import plan_of

from humming_convert.cli import main
from humming_convert.errors import VerificationError
from humming_convert.host.target import emulate
from humming_convert.options import ConvertOptions
from humming_convert.pipeline import convert_checkpoint
from humming_convert.target import Target
from humming_convert.verify import verify
from humming_convert.verify_facts import layer_problems
from humming_loader.checkpoint import read_manifest
from humming_loader.errors import ParallelismError, PreshardedError
from humming_loader.layer import load_layer
from humming_loader.parts import part_name

NAME = "model.layers.0.mlp.experts"


def convert(source: Path, out: Path, **options: Any) -> Path:  # noqa: ANN401 - fields of ConvertOptions
    """Convert and return `out`."""
    convert_checkpoint(ConvertOptions(source=source, out=out, target=Target(90), workers=2, **options))
    return out


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny checkpoint."""
    return make_checkpoint(tmp_path_factory.mktemp("tp") / "source", intermediate=256)


@pytest.fixture(scope="module")
def made(source: Path) -> Path:
    """It, packed for two ranks."""
    return convert(source, source.parent / "out", tp_size=2)


@pytest.fixture
def out(made: Path, tmp_path: Path) -> Path:
    """A copy to spoil."""
    return Path(shutil.copytree(made, tmp_path / "out"))


# Format, family, intermediate size and activation that packed tensors cannot be cut at for two ranks.
FORBIDDEN = [
    ("ct_mxfp4", "qwen3_moe", 192, "fp8", "must be a multiple of 128: this layout cannot be padded"),
    ("mxfp4_gpt_oss", "gpt_oss", 192, "fp8", "this layout cannot be padded"),
    ("ct_fp8_channel", "qwen3_moe", 96, "a16", "gate and up rows meet at 96, not a multiple of 64"),
]


@pytest.mark.parametrize(("format", "family", "size", "activation", "reason"), FORBIDDEN)
def test_sizes_that_packed_tensors_cannot_be_cut_for(
    tmp_path: Path, format: str, family: str, size: int, activation: str, reason: str
) -> None:
    source = make_checkpoint(tmp_path / "src", family, format, layers=1, intermediate=size)
    plain = convert(source, tmp_path / "plain", activation=activation)
    with pytest.raises(ParallelismError, match=reason) as caught:
        load_layer(plain, NAME, "cpu", tp_rank=0, tp_size=2)
    assert str(caught.value).endswith("; for 2, humming-convert SRC OUT --tp 2 cuts before it packs")
    cut = convert(source, tmp_path / "cut", activation=activation, tp_size=2)
    with emulate(Target(90)):
        for rank in (0, 1):
            part = load_layer(cut, NAME, "cpu", tp_rank=rank, tp_size=2)
            assert part.w13.config.shape_n - part.w13.config.pad_shape_n == 2 * part.part.intermediate_size
    verify(cut, source)


def test_experts_of_a_rank_s_part(made: Path) -> None:
    whole = load_layer(made, NAME, "cpu", tp_rank=1, tp_size=2)
    some = load_layer(made, NAME, "cpu", tp_rank=1, tp_size=2, expert_ids=[3, 0])
    weight, chosen = (one.w2.tensors["weight"] for one in (whole, some))
    assert torch.equal(chosen, weight[[3, 0]])
    assert some.w2.config.num_experts == 2


@pytest.mark.parametrize(("tp_size", "experts"), [(1, None), (1, [0, 1]), (4, None)])
def test_other_sizes_are_refused(made: Path, tp_size: int, experts: list[int] | None) -> None:
    with pytest.raises(PreshardedError, match="expected a tensor-parallel size of 2") as caught:
        load_layer(made, NAME, "cpu", tp_rank=0, tp_size=tp_size, expert_ids=experts)
    assert caught.value.mend.startswith("humming-convert source OUT --target sm90 --cuda 13.0 --activation a16")
    assert ("--tp 4" in caught.value.mend) == (tp_size == 4)


def test_a_rank_reads_its_own_file_alone(out: Path) -> None:
    for path in (out / "humming").glob("*.tp1of2.safetensors"):
        path.unlink()
    load_layer(out, NAME, "cpu", tp_rank=0, tp_size=2)


def swap_ranks(out: Path) -> None:
    """Exchange the bytes of both ranks' first layer, and every checksum with them."""
    document = json.loads((out / "humming" / "manifest.json").read_text())
    names = [part_name(NAME, rank, 2) for rank in (0, 1)]
    entries = [document["layers"][name] for name in names]
    paths = [out / entry["sublayers"]["w13"]["tensors"]["weight"]["file"] for entry in entries]
    payloads = [path.read_bytes()[header_of(path)[0] :] for path in paths]
    for key in ("w13", "w2"):
        first, second = (entry["sublayers"][key]["tensors"] for entry in entries)
        for name in first:
            first[name]["sha256"], second[name]["sha256"] = second[name]["sha256"], first[name]["sha256"]
    for name, entry, path, payload in zip(names, entries, paths, reversed(payloads), strict=True):
        begin, header = header_of(path)
        header["__metadata__"]["humming_layers"] = json.dumps({name: entry}, separators=(",", ":"))
        text = json.dumps(header, separators=(",", ":")).encode().ljust(begin - 8)
        path.write_bytes((begin - 8).to_bytes(8, "little") + text + payload)
    (out / "humming" / "manifest.json").write_text(json.dumps(document))


def test_swapped_ranks_with_good_checksums_are_found_by_value(out: Path, source: Path) -> None:
    swap_ranks(out)
    verify(out)
    with pytest.raises(VerificationError) as caught:
        verify(out, source)
    assert [problem.where for problem in caught.value.problems] == [
        f"{part_name(NAME, rank, 2)} {part} {what}"
        for rank in (0, 1)
        for part in ("w13", "w2")
        for what in ("codes", "scale")
    ]


def test_a_file_under_another_rank_s_name_is_found(out: Path) -> None:
    first, second = (out / "humming" / f"experts-00001-of-00002.tp{rank}of2.safetensors" for rank in (0, 1))
    first.write_bytes(second.read_bytes())
    with pytest.raises(VerificationError, match="the manifest's entry for it"):
        verify(out)


def test_another_share_than_the_plan_s_is_found(made: Path, source: Path) -> None:
    manifest = read_manifest(made)
    layer = plan_of(source, tp_size=2).packed[0]
    entry = manifest.layers[layer.layer_name]
    assert entry.tensor_parallel is not None
    assert list(layer_problems(layer, entry)) == []
    moved = replace(entry, tensor_parallel=replace(entry.tensor_parallel, end=64))
    (problem,) = layer_problems(layer, moved)
    assert (problem.where, problem.expected, problem.found) == (
        f"{layer.layer_name}: tensor_parallel", "{'end': 128}, from the source", "{'end': 64}",
    )  # fmt: skip


def run(*arguments: str | Path) -> Result:
    """One command, in this process."""
    return CliRunner().invoke(main, [str(argument) for argument in arguments], catch_exceptions=False)


def test_command_line(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = run("convert", source, out, "--target", "sm90", "--device", "cpu", "--tp", "2")
    assert done.exit_code == 0, done.output
    assert "2 MoE layers packed for each of 2 tensor-parallel ranks" in done.stdout
    shown = run("inspect", out).stdout
    assert "ranks        each of tensor parallelism 2 for itself\n" in shown
    assert f"{NAME}.tp1of2  (qwen3_moe, fp8-block, 4 experts, hidden 256, intermediate 128 to 256 of 256," in shown
    checked = run("verify", out, "--source", source)
    assert checked.exit_code == 0, checked.output
    assert checked.stdout.startswith(f"{out}: 2 MoE layers in 16 packed tensors")


def test_plan_shows_the_shares_and_refuses_what_cannot_be_cut(source: Path, tmp_path: Path) -> None:
    assert "tensor parallelism 2: intermediate size 256 into 128 each\n" in run("plan", source, "--tp", "2").stdout
    assert "tensor parallelism" not in run("plan", source).stdout
    gpt_oss = make_checkpoint(tmp_path / "src", "gpt_oss", "mxfp4_gpt_oss", intermediate=160)
    shown = run("plan", gpt_oss, "--tp", "2").stdout
    assert "tensor parallelism 2: intermediate size 160 into 96 made up to 128, 64 made up to 128\n" in shown
    document = json.loads(run("plan", gpt_oss, "--tp", "2", "--json").stdout)
    assert document["tp_size"] == 2
    assert document["layers"][0]["ranks"][1] == {
        "layer_name": f"{NAME}.tp1of2", "intermediate_size": 128, "begin": 96, "end": 160,
    }  # fmt: skip
    refused = run("plan", source, "--tp", "3")
    assert refused.exit_code == 1
    assert refused.stderr == (
        f"error: {NAME} and 1 more: expected an intermediate size that 3 divides, as vLLM asks, found 256; "
        "tensor-parallel sizes that work: 1, 2, 4, 8, 16, 32, 64\n"
    )


def test_refused_conversions_leave_nothing(source: Path, tmp_path: Path) -> None:
    done = run("convert", source, tmp_path / "out", "--target", "sm90", "--device", "cpu", "--tp", "3")
    assert done.exit_code == 1
    assert list(tmp_path.iterdir()) == []
    assert run("convert", source, tmp_path / "out", "--tp", "0").exit_code == 2
