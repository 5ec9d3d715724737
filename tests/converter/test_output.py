from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
from pathlib import Path

import pytest

from humming_convert.errors import OutputError
from humming_convert.output import OutputFolder

MANIFEST = '{"producer": {"name": "humming-convert"}}'


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "src"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"x")
    return folder


def make(out: Path, source: Path, *, overwrite: bool = False, text: str = "{}") -> None:
    with OutputFolder(out, source_root=source, overwrite=overwrite) as folder:
        folder.write_text("config.json", text)
        folder.write_text("humming/experts-00000.safetensors", "payload")
        folder.commit(MANIFEST)


def listing(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())


def test_everything_appears_at_once(tmp_path: Path, source: Path) -> None:
    out = tmp_path / "out"
    with OutputFolder(out, source_root=source, overwrite=False) as folder:
        entry = folder.write_text("config.json", "{}")
        assert not out.exists()
        folder.commit(MANIFEST)
    assert (entry.name, entry.size, entry.sha256) == ("config.json", 2, hashlib.sha256(b"{}").hexdigest())
    assert listing(tmp_path) == ["out/config.json", "out/humming/manifest.json", "src/model.safetensors"]


def test_leaving_without_commit_leaves_nothing(tmp_path: Path, source: Path) -> None:
    with OutputFolder(tmp_path / "out", source_root=source, overwrite=False) as folder:
        folder.write_text("config.json", "{}")
    assert listing(tmp_path) == ["src/model.safetensors"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["src"]


def test_interrupt_leaves_nothing_and_keeps_the_old_output(tmp_path: Path, source: Path) -> None:
    out = tmp_path / "out"
    make(out, source, text="old")

    def interrupted() -> None:
        with OutputFolder(out, source_root=source, overwrite=True) as folder:
            folder.write_text("config.json", "new")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert (out / "config.json").read_text() == "old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "src"]


def test_overwrite_replaces_all_of_an_old_output(tmp_path: Path, source: Path) -> None:
    out = tmp_path / "out"
    make(out, source, text="old")
    (out / "left.txt").write_text("over")
    make(out, source, overwrite=True, text="new")
    assert (out / "config.json").read_text() == "new"
    assert not (out / "left.txt").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "src"]


def test_an_empty_folder_may_be_overwritten(tmp_path: Path, source: Path) -> None:
    (tmp_path / "out").mkdir()
    make(tmp_path / "out", source, overwrite=True)
    assert (tmp_path / "out" / "humming" / "manifest.json").read_text() == MANIFEST


def test_failed_swap_brings_the_old_output_back(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    make(out, source, text="old")
    real = Path.rename

    def rename(self: Path, target: Path) -> Path:
        if self.name.endswith("humming-partial"):
            raise OSError(5, "Input/output error")
        return real(self, target)

    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(OutputError) as caught:
        make(out, source, overwrite=True, text="new")
    assert str(caught.value) == f"{out}: cannot move the finished output into place: Input/output error"
    assert (out / "config.json").read_text() == "old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "src"]


@pytest.mark.parametrize("call", ["pwrite", "fsync"])
def test_full_disk_leaves_no_output(
    call: str, tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, call, fail)
    with pytest.raises(OutputError, match="No space left on device; free space or choose another folder"):
        make(tmp_path / "out", source)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["src"]


def refused(out: Path, source: Path, *, overwrite: bool = False) -> str:
    before = listing(source.parent)
    with pytest.raises(OutputError) as caught:
        OutputFolder(out, source_root=source, overwrite=overwrite)
    assert listing(source.parent) == before
    return str(caught.value)


def test_refusals(tmp_path: Path, source: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "mine.txt").write_text("mine")
    assert refused(source, source) == (
        f"{source}: lies inside the source {source}; choose a folder outside it"
    )
    assert refused(source / "a" / "b", source) == (
        f"{source}/a/b: lies inside the source {source}; choose a folder outside it"
    )
    assert refused(tmp_path, source, overwrite=True) == (
        f"{tmp_path}: holds the source {source}; choose another folder"
    )
    single = source / "model.safetensors"
    assert refused(source, single, overwrite=True) == (
        f"{source}: holds the source {single}; choose another folder"
    )
    assert refused(other, source) == (
        f"{other}: exists already; choose another folder, or replace it with --overwrite"
    )
    assert refused(other, source, overwrite=True) == (
        f"{other}: holds files that humming-convert did not write, and --overwrite would delete them; "
        "choose another folder or empty this one"
    )
    assert refused(other / "mine.txt", source) == f"{other}/mine.txt: is a file; choose a folder"
    assert refused(tmp_path / "a" / "b", source) == f"{tmp_path}/a: no such folder; make it first"
    assert refused(Path("/"), tmp_path / "nowhere").startswith("/: ")


def test_out_inside_the_source_through_a_link(tmp_path: Path, source: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(source)
    assert "lies inside the source" in refused(link / "out", source)
    assert "lies inside the source" in refused(source / "out", link)


def test_out_beside_a_single_file_source_is_fine(source: Path) -> None:
    make(source / "out", source / "model.safetensors")
    assert (source / "out" / "config.json").exists()


def test_unwritable_parent(tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The tests may run as root, for whom every folder is writable.
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path)
    assert refused(tmp_path / "out", source) == (
        f"{tmp_path}: not writable; choose another folder for the output"
    )


def test_stale_staging_of_a_killed_run_is_replaced(tmp_path: Path, source: Path) -> None:
    stale = tmp_path / ".out.humming-partial"
    stale.mkdir()
    (stale / "half").write_text("half")
    make(tmp_path / "out", source)
    assert not (tmp_path / "out" / "half").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "src"]


def test_a_run_that_is_alive_is_not_disturbed(tmp_path: Path, source: Path) -> None:
    staging = tmp_path / ".out.humming-partial"
    staging.mkdir()
    descriptor = os.open(staging, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    with pytest.raises(OutputError, match="another run is writing this output; wait for it"):
        make(tmp_path / "out", source)
    os.close(descriptor)
    assert staging.exists()


def test_required_space(tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = OutputFolder(tmp_path / "out", source_root=source, overwrite=False)
    usage = shutil.disk_usage(tmp_path)._replace(free=99)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    folder.require_space(99)
    with pytest.raises(OutputError) as caught:
        folder.require_space(100)
    assert str(caught.value) == (
        f"{tmp_path}/out: needs 100 bytes, 99 are free; free space or choose another folder"
    )
