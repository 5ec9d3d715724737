"""Which kernels are compiled and how they are put in place, with a stand-in for CUDA's compiler."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from click.testing import CliRunner, Result
from tests.support.checkpoints import make_checkpoint

from humming_convert.cli import main
from humming_convert.device_facts import KNOWN, find_facts
from humming_convert.errors import UnsupportedError
from humming_convert.host import kernels as host_kernels
from humming_convert.host.foreign import Foreign
from humming_convert.host.kernels import KernelHost, Request
from humming_convert.kernel_requests import GEMM_TYPES, Serving, ask, rank_layers
from humming_convert.kernels import KernelOptions, build_kernels
from humming_convert.options import ConvertOptions
from humming_convert.pipeline import convert_checkpoint
from humming_convert.target import Target
from humming_convert.verify_output import read_manifest
from humming_loader.errors import ParallelismError, PreshardedError
from humming_loader.kernel_entries import KERNELS_FOLDER, KERNELS_MANIFEST, Identity, from_json

H200 = KNOWN["NVIDIA H200"]


def converted(folder: Path, family: str, format: str, activation: str = "a16", sm: int = 90) -> Path:
    source = make_checkpoint(
        folder / f"{family}-{format}", family, format, layers=2, experts=8, hidden=512, intermediate=512
    )
    out = folder / f"{family}-{format}-{activation}.out"
    options = ConvertOptions(source=source, out=out, target=Target(sm), activation=activation, overwrite=True)
    convert_checkpoint(options)
    return out


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers in block FP8."""
    return converted(tmp_path_factory.mktemp("kernels"), "qwen3_moe", "fp8_block")


@pytest.fixture(scope="module")
def gpt_oss(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers in MXFP4 with biases, gate and up interleaved."""
    return converted(tmp_path_factory.mktemp("kernels"), "gpt_oss", "mxfp4_gpt_oss")


@pytest.fixture(scope="module")
def fp8_activations(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers in block FP8 whose activations are quantized."""
    return converted(tmp_path_factory.mktemp("kernels"), "qwen3_moe", "fp8_block", "fp8")


def requests_of(out: Path, serving: Serving, facts: dict[str, Foreign] = H200) -> tuple[list[Request], list[str]]:
    with KernelHost(Target(90), facts) as host:
        notes = ask(host, rank_layers(read_manifest(out), serving), serving)
        return host.requests(), notes


@pytest.fixture
def nvrtc(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A compiler that makes a kernel of any text; `fail_after` kernels it breaks."""
    found = SimpleNamespace(name="nvrtc 13.0 test", version=(13, 0), fail_after=1 << 30)

    def compile(
        _: object, requests: list[Request], workers: int, toolchain: object
    ) -> Iterator[tuple[Request, Identity, bytes]]:
        for number, request in enumerate(requests):
            if number >= found.fail_after:
                raise UnsupportedError([])
            digest = f"{number:064x}"
            identity = Identity(
                source=digest,
                expression=request.expression,
                flags=(),
                headers=digest,
                arch=request.arch,
                compiler=found.name,
                humming="0.1.19",
                tools=digest,
            )
            yield request, identity, request.source.encode()

    monkeypatch.setattr(KernelHost, "toolchain", lambda self: found)
    monkeypatch.setattr(KernelHost, "compile", compile)
    return found


def test_every_number_of_rows_has_its_kernel(out: Path) -> None:
    """Humming's own table of one sublayer, asked for directly."""
    requests, notes = requests_of(out, Serving(("indexed",)))
    assert notes == []
    gemms = [request for request in requests if request.kind == "gemm"]
    layer = next(iter(read_manifest(out).layers.values()))
    chosen = set()
    with KernelHost(Target(90), H200):
        modules = host_kernels.modules()
        for entry in layer.sublayers.values():
            config = modules.config.LayerConfig(**json.loads(entry.layer_config))
            rows = modules.tune.get_heuristics_config(config, gemm_type="indexed", device=0)
            assert (rows[0][0], rows[-1][1]) == (0, 1 << 30)
            assert all(left[1] == right[0] for left, right in pairwise(rows))
            for _, _, tuning in rows:
                chosen.add((config.to_str(), json.dumps({k: v for k, v in tuning.items() if k != "num_sms"})))
    assert len(gemms) == len(chosen) > 10
    assert {request.arch for request in requests} == {"90a"}
    assert all(request.disable_fast_math for request in requests)


def process_sources(requests: list[Request]) -> list[str]:
    return [request.source for request in requests if request.kind == "process_input"]


def test_sixteen_bit_activations_need_the_activation_alone(out: Path) -> None:
    sources = process_sources(requests_of(out, Serving(("indexed",)))[0])
    assert sources
    assert all("(a / (1.f + expf(-a))) * b" in source for source in sources)
    assert all("BinarySplit" in source for source in sources)


def test_gpt_oss_has_its_own_activation(gpt_oss: Path) -> None:
    sources = process_sources(requests_of(gpt_oss, Serving(("indexed",)))[0])
    assert sources
    assert all("BinaryInterleaved" in source and "-(1.702f) * gate" in source for source in sources)


def test_an_activation_that_is_not_known_is_left_to_the_serving_host(out: Path) -> None:
    with KernelHost(Target(90), H200) as host:
        layers = rank_layers(read_manifest(out), Serving(("indexed",)))
        notes = ask(host, [replace(layer, activation_function="situ") for layer in layers], Serving(("indexed",)))
        assert notes == ["activation situ: its kernel is compiled where the checkpoint is served"]
        assert {request.kind for request in host.requests()} == {"gemm"}


def test_quantized_activations_are_quantized_before_both_sublayers(fp8_activations: Path) -> None:
    sources = process_sources(requests_of(fp8_activations, Serving(("indexed",)))[0])
    assert {"ActivationType::None" in source for source in sources} == {True, False}


def test_grouped_rows_are_scattered_to_their_experts(out: Path) -> None:
    plain = set(process_sources(requests_of(out, Serving(("indexed",)))[0]))
    requests, notes = requests_of(out, Serving(("grouped",), top_k=2))
    more = set(process_sources(requests)) - plain
    assert notes == []
    assert more
    assert all("ProcessInputLayoutType::Scatter" in source and "kScatterWidth = 2u" in source for source in more)
    requests, notes = requests_of(out, Serving(("grouped",)))
    assert set(process_sources(requests)) <= plain
    assert notes == ["grouped: the kernel that scatters rows needs --top-k, the experts of a token"]


@pytest.mark.parametrize("gemm_type", GEMM_TYPES)
def test_each_way_of_grouping_is_another_kernel(out: Path, gemm_type: str) -> None:
    requests, _ = requests_of(out, Serving((gemm_type,), top_k=2))
    name = {"indexed": "Indexed", "grouped": "GroupedContiguous", "grouped_masked": "GroupedMasked"}[gemm_type]
    wanted = f"GemmType::{name.upper()}" if gemm_type == "indexed" else f"GemmType::{GEMM_TYPES[gemm_type].upper()}"
    assert all(wanted in request.source for request in requests if request.kind == "gemm")


def test_shapes_of_every_rank(out: Path) -> None:
    manifest = read_manifest(out)
    ranks = rank_layers(manifest, Serving(("indexed",), tp_sizes=(1, 2, 4), ep_sizes=(3,)))
    shapes = {(rank.w13.shape_n, rank.w2.shape_k, rank.w13.num_experts) for rank in ranks}
    assert shapes == {(1024, 512, 8), (512, 256, 8), (256, 128, 8), (1024, 512, 2), (1024, 512, 3)}
    with pytest.raises(ParallelismError):
        rank_layers(manifest, Serving(("indexed",), tp_sizes=(3,)))
    with pytest.raises(UnsupportedError, match="--ep: expected at most 8, the experts, found 9"):
        rank_layers(manifest, Serving(("grouped",), ep_sizes=(9,)))


def test_experts_that_were_cut_before_they_were_packed(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "source", "qwen3_moe", "fp8_block", hidden=512, intermediate=512)
    convert_checkpoint(ConvertOptions(source=source, out=tmp_path / "OUT", target=Target(90), tp_size=2))
    manifest = read_manifest(tmp_path / "OUT")
    ranks = rank_layers(manifest, Serving(("indexed",), tp_sizes=(2,)))
    assert [(rank.w13.shape_n, rank.w2.shape_k) for rank in ranks] == [(512, 256)]
    with pytest.raises(PreshardedError):
        rank_layers(manifest, Serving(("indexed",), tp_sizes=(1,)))


def test_the_same_question_has_the_same_answer(out: Path) -> None:
    """And another GPU's facts another, in the same process."""
    first, _ = requests_of(out, Serving(("indexed",)))
    other, _ = requests_of(out, Serving(("indexed",)), H200 | {"sm_count": 78, "name": "NVIDIA H20"})
    again, _ = requests_of(out, Serving(("indexed",)))
    texts = [[(request.source, request.expression) for request in found] for found in (first, again, other)]
    assert texts[0] == texts[1]
    assert set(texts[0]) != set(texts[2])


def test_everything_is_put_back(out: Path) -> None:
    modules = host_kernels.modules()
    runtime, gemm = modules.jit_runtime.KernelRuntime, modules.kernel_humming.HummingKernel

    def state() -> list[object]:
        return [
            dict(modules.device.DeviceInfo._instances),
            dict(runtime._instances),
            dict(gemm._str2kernel_cache),
            runtime.__dict__["prepare"],
            runtime.__dict__["compile_many"],
            gemm.__dict__["register_kernel"],
            torch.cuda.current_device,
            torch.version.cuda,
            modules.utils_jit.get_humming_cache_dir,
        ]

    before = state()
    requests_of(out, Serving(("indexed",)))
    with pytest.raises(KeyError), KernelHost(Target(90), H200):
        raise KeyError
    assert state() == before


def test_facts_of_a_gpu(tmp_path: Path) -> None:
    assert find_facts(Target(90), None, None) is H200
    assert find_facts(Target(90), "NVIDIA H200", None) is H200
    file = tmp_path / "facts.json"
    file.write_text(json.dumps(H200 | {"sm_version": 100, "name": "B", "memory_bandwidth_gbps": 8000}))
    assert find_facts(Target(100), None, file)["name"] == "B"


@pytest.mark.parametrize(
    ("sm", "name", "text", "message"),
    [
        (100, None, None, "--device-name: expected one whose facts are known: NVIDIA H200, found none of sm100; give"),
        (90, "NVIDIA X1", None, "found NVIDIA X1; give --device-facts FILE"),
        (80, "NVIDIA H200", None, "expected a GPU of sm80, found NVIDIA H200, sm90"),
        (90, None, "[]", "expected an object, found list"),
        (90, None, "{", "expected the facts of a GPU in JSON"),
        (90, None, json.dumps(H200 | {"sm_count": "132"}), "sm_count: expected a value of type int, found '132'"),
        (90, None, json.dumps({k: v for k, v in H200.items() if k != "name"}), "name: expected a value of type str"),
    ],
)
def test_facts_that_are_not_known(tmp_path: Path, sm: int, name: str | None, text: str | None, message: str) -> None:
    file = None
    if text is not None:
        file = tmp_path / "facts.json"
        file.write_text(text)
    with pytest.raises(UnsupportedError) as caught:
        find_facts(Target(sm), name, file)
    assert message in str(caught.value)


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments], catch_exceptions=False)


def test_kernels_lie_beside_the_experts(nvrtc: SimpleNamespace, tmp_path: Path) -> None:
    out = converted(tmp_path, "qwen3_moe", "fp8_block")
    result = run("kernels", out, "--target", "sm90", "--device-name", "NVIDIA H200", "--gemm-type", "indexed")
    assert result.exit_code == 0, result.output
    manifest = from_json((out / KERNELS_MANIFEST).read_bytes())
    assert len(manifest.kernels) > 10
    assert f": {len(manifest.kernels)} kernels (" in result.stdout
    assert "for NVIDIA H200, indexed, by nvrtc 13.0 test" in result.stdout
    assert {path.relative_to(out).as_posix() for path in (out / KERNELS_FOLDER).iterdir()} == set(manifest.files())
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
    assert run("verify", out).exit_code == 0
    assert (manifest.gemm_types, dict(manifest.parallel)) == (("indexed",), {"tp": [1], "ep": []})
    again = run("kernels", out, "--gemm-type", "indexed,grouped", "--tp", "1,2", "--ep", "2")
    assert again.exit_code == 0, again.output
    more = from_json((out / KERNELS_MANIFEST).read_bytes())
    assert len(more.kernels) > 2 * len(manifest.kernels)
    assert (more.gemm_types, dict(more.parallel)) == (("indexed", "grouped"), {"tp": [1, 2], "ep": [2]})
    assert {path.relative_to(out).as_posix() for path in (out / KERNELS_FOLDER).iterdir()} == set(more.files())
    assert run("verify", out).exit_code == 0


def test_verify_finds_damaged_and_unknown_kernels(nvrtc: SimpleNamespace, tmp_path: Path) -> None:
    out = converted(tmp_path, "qwen3_moe", "fp8_block")
    build_kernels(out, KernelOptions())
    one, two = sorted((out / KERNELS_FOLDER).glob("*.cubin"))[:2]
    one.write_bytes(b"x" * one.stat().st_size)
    two.rename(two.with_name("another.cubin"))
    result = run("verify", out)
    assert result.exit_code == 1
    assert f"{KERNELS_FOLDER}/{one.name}: expected sha256" in result.stderr
    assert f"{KERNELS_FOLDER}/{two.name}: expected a readable file" in result.stderr
    assert f"{KERNELS_FOLDER}/another.cubin: expected only files that the manifest lists" in result.stderr


def test_overwrite_replaces_an_output_with_kernels(nvrtc: SimpleNamespace, tmp_path: Path) -> None:
    out = converted(tmp_path, "qwen3_moe", "fp8_block")
    build_kernels(out, KernelOptions())
    converted(tmp_path, "qwen3_moe", "fp8_block")
    assert not (out / KERNELS_FOLDER).exists()
    build_kernels(out, KernelOptions())
    (out / KERNELS_FOLDER / "notes.txt").write_text("mine")
    source = tmp_path / "qwen3_moe-fp8_block"
    result = run("convert", source, out, "--target", "sm90", "--overwrite")
    assert result.exit_code == 1
    assert "holds what its manifest does not list" in result.stderr


def test_convert_compiles_when_asked(nvrtc: SimpleNamespace, tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "source", "qwen3_moe", "fp8_block", hidden=512, intermediate=512)
    result = run("convert", source, tmp_path / "OUT", "--target", "sm90", "--kernels")
    assert result.exit_code == 0, result.output
    assert (tmp_path / "OUT" / KERNELS_MANIFEST).is_file()


def test_convert_looks_for_the_compiler_first(
    nvrtc: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(self: KernelHost) -> None:
        raise UnsupportedError([])

    monkeypatch.setattr(KernelHost, "toolchain", missing)
    source = make_checkpoint(tmp_path / "source", "qwen3_moe", "fp8_block", hidden=512, intermediate=512)
    assert run("convert", source, tmp_path / "OUT", "--target", "sm90", "--kernels").exit_code == 1
    assert not (tmp_path / "OUT").exists()


def test_a_failing_run_leaves_the_kernels_that_were_there(nvrtc: SimpleNamespace, tmp_path: Path) -> None:
    out = converted(tmp_path, "qwen3_moe", "fp8_block")
    build_kernels(out, KernelOptions())
    before = {path.name: path.read_bytes() for path in (out / KERNELS_FOLDER).iterdir()}
    nvrtc.fail_after = 3
    with pytest.raises(UnsupportedError):
        build_kernels(out, KernelOptions())
    assert {path.name: path.read_bytes() for path in (out / KERNELS_FOLDER).iterdir()} == before
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--target", "sm100"], "error: --target: expected sm90, as the checkpoint was converted for, found sm100"),
        (["--gemm-type", "dense"], "error: --gemm-type: expected of indexed, grouped, grouped_masked, found 'dense'"),
        (["--device-name", "GTX"], "error: --device-name: expected one whose facts are known: NVIDIA H200, found GTX"),
        (["--tp", "7"], "cannot be cut for tensor parallelism of 7"),
    ],
)
def test_refusals(nvrtc: SimpleNamespace, out: Path, arguments: list[str], message: str) -> None:
    result = run("kernels", out, *arguments)
    assert result.exit_code == 1
    assert message in result.stderr
    assert not (out / KERNELS_FOLDER).exists()


def _other_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_kernels, "Toolchain", lambda: SimpleNamespace(version=(13, 1)))


def _no_toolkit(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise RuntimeError("No suitable CUDA 13 environment found.")

    monkeypatch.setattr(host_kernels.modules().utils_nvrtc, "get_nvrtc_library_path", missing)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_other_version, "kernels: expected NVRTC 13.0, as the target says, found 13.1; pip install 'cuda-toolkit["),
        (_no_toolkit, "No suitable CUDA 13 environment found.; pip install 'humming-convert[kernels]'"),
    ],
)
def test_a_machine_that_cannot_compile(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[pytest.MonkeyPatch], None], message: str
) -> None:
    change(monkeypatch)
    with KernelHost(Target(90), H200) as host, pytest.raises(UnsupportedError) as caught:
        host.toolchain()
    assert message in str(caught.value)
