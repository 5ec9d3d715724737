"""Shipped kernels: used when everything that determines the code is the same, left alone when any of it is not."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.support.kernel_host import CUBIN, EXPRESSION, SOURCE, Host, offered, ship

from humming_loader import kernels
from humming_loader.kernel_entries import KERNELS_MANIFEST


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    """A serving host; offers are withdrawn before it goes."""
    found = Host(tmp_path / "host", monkeypatch)
    yield found
    kernels.withdraw()


@pytest.fixture
def shipped(host: Host, tmp_path: Path) -> Path:
    """The file of a kernel that was compiled on a host like this one."""
    return ship(tmp_path / "OUT", host.identity())


def out_of(cubin: Path) -> Path:
    return cubin.parents[2]


def test_the_same_kernel_is_used(host: Host, shipped: Path) -> None:
    offer, lines = offered(out_of(shipped))
    assert offer is not None
    assert host.ask() == shipped.as_posix()
    assert host.ask(kernel_expr=" ".join(EXPRESSION.split())) == shipped.as_posix()
    assert host.compiled == []
    assert lines == []
    assert offer.summary() == f"{out_of(shipped)}: kernels that came with the checkpoint: 1 used"


def test_paths_and_file_times_do_not_matter(host: Host, shipped: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "another place" / "deeper"
    elsewhere.parent.mkdir()
    host.include = host.include.rename(elsewhere)
    host.library = host.library.rename(tmp_path / "another.so")
    (elsewhere / "humming/kernel.cuh").touch()
    offered(out_of(shipped))
    assert host.ask() == shipped.as_posix()


def test_a_header_that_is_not_included_does_not_matter(host: Host, shipped: Path) -> None:
    host.header("humming/unrelated.cuh", "// another text\n")
    offered(out_of(shipped))
    assert host.ask() == shipped.as_posix()


def change_header(host: Host) -> None:
    host.header("humming/parts/loader.cuh", "// Loads\n#include <stddef.h>\n")


def add_header(host: Host) -> None:
    host.header("stddef.h", "")


def shadow_header(host: Host) -> None:
    host.header("parts/loader.cuh", "// loads\n#include <stddef.h>\n")


def change_shim(host: Host) -> None:
    shims = host.compiler._STD_HEADER_SHIMS
    host.monkeypatch.setattr(host.compiler, "_STD_HEADER_SHIMS", shims | {"climits": "#include <cuda/std/cfloat>"})


def change_flag(host: Host) -> None:
    host.monkeypatch.setenv("HUMMING_DEBUG_KERNEL", "1")
    host.monkeypatch.setattr(host.compiler, "debug_kernel_flags", staticmethod(lambda: ["-DHUMMING_DEBUG_KERNEL=1"]))


def order_of_flags(host: Host) -> None:
    flags = host.compiler.get_flags("90a", True)
    reverse = classmethod(lambda cls, sm_version, disable_fast_math=False: flags[::-1])
    host.monkeypatch.setattr(host.compiler, "get_flags", reverse)


def change_version(host: Host) -> None:
    host.version = (13, 1)


def change_build(host: Host) -> None:
    host.say_build("cuda_13.0.r13.0/compiler.36424715_0")


def no_build(host: Host) -> None:
    host.say_build("no such text")


def change_humming(host: Host) -> None:
    host.monkeypatch.setattr("humming_loader.toolchain.version", lambda name: "0.1.18")


def change_tools(host: Host) -> None:
    host.monkeypatch.setattr("humming_loader.toolchain._TOOLS", ("patch_cubin.cpp",))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (change_header, "another content of headers"),
        (add_header, "another content of headers"),
        (shadow_header, "another content of headers"),
        (change_shim, "another content of headers"),
        (change_flag, "flags '-DHUMMING_DEBUG_KERNEL=0' in the checkpoint and '-DHUMMING_DEBUG_KERNEL=1' here"),
        (order_of_flags, "flags"),
        (change_version, "compiler 'nvrtc 13.0 cuda_13.0.r13.0/compiler.36424714_0' in the checkpoint and 'nvrtc 13.1"),
        (change_build, "and 'nvrtc 13.0 cuda_13.0.r13.0/compiler.36424715_0' here"),
        (no_build, "compiler"),
        (change_humming, "and '0.1.18' here"),
        (change_tools, "another content of tools"),
    ],
)
def test_a_changed_host_compiles(host: Host, shipped: Path, change: Callable[[Host], None], reason: str) -> None:
    change(host)
    offer, _ = offered(out_of(shipped))
    assert offer is not None
    assert host.ask() == "compiled here"
    assert host.compiled == [SOURCE]
    assert "kernels that came with the checkpoint: 0 used, 1 left to Humming's own compiler: 1 with" in offer.summary()
    assert reason in offer.summary()


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        ({"sm_version": "100a"}, "arch '90a' in the checkpoint and '100a' here"),
        ({"disable_fast_math": False}, "flags 'none' in the checkpoint and '--use_fast_math' here"),
        ({"code": SOURCE + " "}, "not among those that were shipped"),
        ({"kernel_expr": EXPRESSION.replace("2", "3")}, "not among those that were shipped"),
        ({"kernel_expr": None}, "not among those that were shipped"),
        ({"code": SOURCE.replace("<humming/kernel.cuh>", "WHAT")}, "not known (header source: expected an include"),
    ],
)
def test_another_request_compiles(host: Host, shipped: Path, request_: dict[str, object], reason: str) -> None:
    offer, _ = offered(out_of(shipped))
    assert offer is not None
    assert host.ask(**request_) == "compiled here"
    assert reason in offer.summary()


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    "damage",
    [flip, lambda path: path.write_bytes(CUBIN[:-1]), lambda path: path.write_bytes(CUBIN + b"\0"), Path.unlink],
    ids=["flipped bit", "shorter", "longer", "missing"],
)
def test_a_damaged_kernel_is_compiled(host: Host, shipped: Path, damage: Callable[[Path], None]) -> None:
    damage(shipped)
    offer, _ = offered(out_of(shipped))
    assert offer is not None
    assert host.ask() == "compiled here"
    assert "0123.cubin is missing or damaged" in offer.summary()


def test_without_kernels_nothing_is_touched(host: Host, tmp_path: Path) -> None:
    (tmp_path / "OUT/humming").mkdir(parents=True)
    (tmp_path / "OUT/humming/manifest.json").write_text("{}")
    assert offered(tmp_path / "OUT") == (None, [])
    assert "compile" not in vars(host.compiler)
    assert host.ask() == "compiled here"


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"format_version": 2}', "\0"])
def test_a_manifest_that_cannot_be_read_is_one_line(host: Host, shipped: Path, text: str) -> None:
    (out_of(shipped) / KERNELS_MANIFEST).write_text(text)
    offer, lines = offered(out_of(shipped))
    assert offer is None
    assert len(lines) == 1
    assert "its compiled kernels are not used: " in lines[0]
    assert host.ask() == "compiled here"


def test_a_host_without_nvrtc_is_one_line(host: Host, shipped: Path) -> None:
    host.library.unlink()
    offer, lines = offered(out_of(shipped))
    assert offer is None
    assert len(lines) == 1
    assert host.ask() == "compiled here"


def test_a_humming_without_the_seam_is_one_line(host: Host, shipped: Path) -> None:
    host.monkeypatch.setattr(host.compiler, "compile", classmethod(lambda cls, job: "compiled here"), raising=False)
    offer, lines = offered(out_of(shipped))
    assert offer is None
    assert lines == [
        f"{out_of(shipped)}: its compiled kernels are not used: humming.jit.compiler: expected a compiler that takes "
        "code, sm_version, kernel_expr, disable_fast_math, found (job)"
    ]


@pytest.mark.parametrize("cache", ["/dev/null/cache", "/proc/humming/cache"])
def test_no_cache_folder_is_needed(host: Host, shipped: Path, cache: str) -> None:
    """Neither can be made, whoever asks."""
    host.monkeypatch.setenv("HUMMING_CACHE_DIR", cache)
    offered(out_of(shipped))
    assert host.ask() == shipped.as_posix()


def test_nothing_is_written(host: Host, shipped: Path, tmp_path: Path) -> None:
    host.monkeypatch.setenv("HUMMING_CACHE_DIR", str(tmp_path / "cache"))
    before = sorted(tmp_path.rglob("*"))
    offered(out_of(shipped))
    host.ask()
    host.ask(sm_version="100a")
    assert sorted(tmp_path.rglob("*")) == before


def test_two_checkpoints(host: Host, shipped: Path, tmp_path: Path) -> None:
    change_header(host)
    other = ship(tmp_path / "OTHER", host.identity())
    offered(out_of(shipped))
    kernels.offer(out_of(other))
    assert host.ask() == other.as_posix()


def test_offered_again_is_the_same_offer(host: Host, shipped: Path) -> None:
    offer, _ = offered(out_of(shipped))
    assert kernels.offer(out_of(shipped)) is offer


def test_withdrawn_humming_is_as_it_was(host: Host, shipped: Path) -> None:
    offered(out_of(shipped))
    kernels.withdraw()
    assert "compile" not in vars(host.compiler)
    assert host.ask() == "compiled here"


def test_one_line_after_a_burst(host: Host, shipped: Path) -> None:
    host.monkeypatch.setattr(kernels, "QUIET_SECONDS", 0.2)
    _, lines = offered(out_of(shipped))
    for _ in range(3):
        host.ask()
    host.ask(sm_version="100a")
    deadline = time.monotonic() + 20
    while not lines and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.5)
    assert len(lines) == 1
    assert "checkpoint: 1 used, 1 left to Humming's own compiler: 1 with flags" in lines[0]


def hub_snapshot(folder: Path) -> Path:
    path = folder / "models--org--name" / "snapshots" / "0123abcd"
    path.mkdir(parents=True)
    return path


def hub_download(folder: Path) -> Path:
    (folder / "here" / ".cache" / "huggingface").mkdir(parents=True)
    return folder / "here"


@pytest.mark.parametrize(
    ("said", "local", "hub"),
    [("", True, False), ("1", True, True), ("true", True, True), ("0", False, False), ("perhaps", False, False)],
)
def test_who_is_trusted(tmp_path: Path, said: str, local: bool, hub: bool) -> None:
    environ = {kernels.TRUST_VARIABLE: said}
    assert kernels.is_trusted(tmp_path, environ) is local
    assert kernels.is_trusted("org/name", environ) is hub
    snapshot = hub_snapshot(tmp_path)
    (tmp_path / "link").symlink_to(snapshot)
    for folder in (snapshot, tmp_path / "link", hub_download(tmp_path)):
        assert kernels.is_trusted(folder, environ) is hub


def test_kernels_of_the_hub_are_left_alone_and_said_so(host: Host, tmp_path: Path) -> None:
    out = hub_snapshot(tmp_path)
    ship(out, host.identity())
    assert offered(out) == (
        None,
        [f"{out}: its compiled kernels are not used: code from there runs only with HUMMING_LOADER_TRUST_KERNELS=1"],
    )
    assert host.ask() == "compiled here"
    host.monkeypatch.setenv(kernels.TRUST_VARIABLE, "1")
    offered(out)
    assert host.ask() != "compiled here"
