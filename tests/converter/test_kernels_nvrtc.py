"""CUDA's own compiler, without a GPU: what is compiled, that its place does not matter, and that it is found again.

Needs NVRTC and CUDA's headers (`humming-convert[kernels]`); HUMMING_EXPECT_NVRTC makes their absence an error.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.checkpoints import make_checkpoint

from humming_convert.device_facts import KNOWN
from humming_convert.errors import UnsupportedError
from humming_convert.host import kernels as host_kernels
from humming_convert.host.kernels import KernelHost, Request
from humming_convert.kernel_requests import Serving, ask, rank_layers
from humming_convert.kernels import KernelOptions, build_kernels
from humming_convert.options import ConvertOptions
from humming_convert.pipeline import convert_checkpoint
from humming_convert.target import Target
from humming_convert.verify_output import read_manifest
from humming_loader import kernels
from humming_loader.kernel_entries import KERNELS_MANIFEST, from_json
from humming_loader.toolchain import Toolchain

pytestmark = pytest.mark.slow

H200 = KNOWN["NVIDIA H200"]


@pytest.fixture(scope="module")
def toolchain() -> Toolchain:
    """The compiler of this machine; without one, the module is skipped."""
    host_kernels.modules()
    try:
        with KernelHost(Target(90), H200) as host:
            return host.toolchain()
    except UnsupportedError as error:
        if os.environ.get("HUMMING_EXPECT_NVRTC"):
            raise
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny checkpoint, converted."""
    folder = tmp_path_factory.mktemp("nvrtc")
    source = make_checkpoint(folder / "source", "qwen3_moe", "fp8_block", hidden=512, intermediate=512)
    convert_checkpoint(ConvertOptions(source=source, out=folder / "OUT", target=Target(90)))
    return folder / "OUT"


@pytest.fixture
def host() -> Iterator[KernelHost]:
    """Humming on an H200 that is not there."""
    with KernelHost(Target(90), H200) as found:
        yield found


def two_requests(host: KernelHost, out: Path) -> list[Request]:
    """One kernel of each kind, the first of its kind."""
    serving = Serving(("indexed",))
    ask(host, rank_layers(read_manifest(out), serving), serving)
    return list({request.kind: request for request in reversed(host.requests())}.values())


def test_the_headers_that_are_counted_are_all_that_are_needed(
    toolchain: Toolchain, host: KernelHost, out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copied alone to other folders, with other file times, they give the same bytes and the same identity."""
    requests = two_requests(host, out)
    assert [request.kind for request in requests] == ["process_input", "gemm"]
    expected = [(identity, cubin) for _, identity, cubin in host.compile(requests, 2, toolchain)]
    roots = [Path(root) for root in toolchain.compiler._get_include_dirs()]
    copies = [tmp_path / "elsewhere" / ("x" * number) / f"root{number}" for number in range(1, len(roots) + 1)]
    count = 0
    for path in {path for request in requests for path in toolchain.headers.files(request.source)}:
        inside = [number for number, root in enumerate(roots) if path.is_relative_to(root)]
        number = max(inside, key=lambda one: len(roots[one].parts))
        target = copies[number] / path.relative_to(roots[number])
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
        count += 1
    assert 300 < count < 600
    monkeypatch.setattr(toolchain.compiler, "_get_include_dirs", classmethod(lambda cls: [str(c) for c in copies]))
    assert [(identity, cubin) for _, identity, cubin in host.compile(requests, 2, Toolchain())] == expected


def test_what_was_compiled_is_found_again(toolchain: Toolchain, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Humming's own request for each kernel, on the same stand-in GPU, is answered with the shipped file."""
    wanted: list[Request] = []

    def few(self: KernelHost) -> list[Request]:
        found = list(self._requests.values())
        wanted[:] = list({request.kind: request for request in reversed(found)}.values())
        return wanted

    monkeypatch.setattr(KernelHost, "requests", few)
    report = build_kernels(out, KernelOptions(workers=2))
    assert report.kernels == 2
    assert report.compiler == toolchain.name
    manifest = from_json((out / KERNELS_MANIFEST).read_bytes())
    kernels.withdraw()
    try:
        with KernelHost(Target(90), H200):
            offer = kernels.offer(out)
            assert offer is not None
            for request in wanted:
                path = toolchain.compiler.compile(
                    request.source,
                    sm_version=request.arch,
                    kernel_expr=request.expression,
                    disable_fast_math=request.disable_fast_math,
                    postprocess_cubin=request.postprocess,
                )
                assert Path(path).read_bytes()[:4] == b"\x7fELF"
                assert Path(path).parent == out / "humming" / "kernels"
        assert offer.used == {kernel.file.name for kernel in manifest.kernels}
        assert not offer.refused
    finally:
        kernels.withdraw()
