from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from humming_convert.errors import OutputError
from humming_convert.output import OutputFolder

FILES = ("config.json", "humming/experts-00000.safetensors")
MANIFEST = json.dumps(
    {
        "producer": {"name": "humming-convert"},
        "source": {"files": [{"name": "model.safetensors"}]},
        "layers": {"l": {"sublayers": {"w13": {"tensors": {"weight": {"file": FILES[1]}}}}}},
        "side_files": [{"name": FILES[0]}],
    }
)


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


def write(path: Path) -> None:
    """A file that somebody else has put there."""
    path.parent.mkdir(exist_ok=True)
    path.write_text("mine")


def finish(folder: OutputFolder, meanwhile: Callable[[], object]) -> None:
    """A run during which something happens."""
    with folder:
        meanwhile()
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
    (out / "humming" / "experts-00000.safetensors").write_text("damaged")
    make(out, source, overwrite=True, text="new")
    assert (out / "config.json").read_text() == "new"
    assert (out / "humming" / "experts-00000.safetensors").read_text() == "payload"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "src"]


def test_an_empty_folder_may_be_overwritten(tmp_path: Path, source: Path) -> None:
    (tmp_path / "out").mkdir()
    make(tmp_path / "out", source, overwrite=True)
    assert (tmp_path / "out" / "humming" / "manifest.json").read_text() == MANIFEST


def test_failed_swap_brings_the_old_output_back(tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_full_disk_leaves_no_output(call: str, tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert refused(source, source) == (f"{source}: lies inside the source {source}; choose a folder outside it")
    assert refused(source / "a" / "b", source) == (
        f"{source}/a/b: lies inside the source {source}; choose a folder outside it"
    )
    assert refused(tmp_path, source, overwrite=True) == (
        f"{tmp_path}: holds the source {source}; choose another folder"
    )
    single = source / "model.safetensors"
    assert refused(source, single, overwrite=True) == (f"{source}: holds the source {single}; choose another folder")
    assert refused(other, source) == (f"{other}: exists already; choose another folder, or replace it with --overwrite")
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
    assert refused(tmp_path / "out", source) == (f"{tmp_path}: not writable; choose another folder for the output")


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
    assert str(caught.value) == (f"{tmp_path}/out: needs 100 bytes, 99 are free; free space or choose another folder")


def test_overwrite_deletes_nothing_that_the_manifest_does_not_list(tmp_path: Path, source: Path) -> None:
    out = tmp_path / "out"
    make(out, source)
    added = ("humming/notes", "mine.txt", "model.safetensors", "sub/deep.txt")
    for name in added:
        (out / name).parent.mkdir(exist_ok=True)
        (out / name).write_text("mine")
    text = refused(out, source, overwrite=True)
    assert text == (
        f"{out}: holds what its manifest does not list, and --overwrite would delete it: "
        "humming/notes, mine.txt, model.safetensors and 2 more; move it away or choose another folder"
    )
    assert all((out / name).read_text() == "mine" for name in added)


@pytest.mark.parametrize("kind", ["link", "fifo", "empty folder"])
def test_overwrite_counts_everything_that_is_there(kind: str, tmp_path: Path, source: Path) -> None:
    out = tmp_path / "out"
    make(out, source)
    if kind == "link":
        (out / "mine").symlink_to(source)
    elif kind == "fifo":
        os.mkfifo(out / "mine")
    else:
        (out / "mine").mkdir()
    assert "would delete it: mine; move it away" in refused(out, source, overwrite=True)


def test_a_manifest_that_is_a_fifo_is_refused_at_once(tmp_path: Path, source: Path) -> None:
    (tmp_path / "out" / "humming").mkdir(parents=True)
    os.mkfifo(tmp_path / "out" / "humming" / "manifest.json")
    assert "humming-convert did not write" in refused(tmp_path / "out", source, overwrite=True)


@pytest.mark.parametrize("what", ["folder", "file", "link", "output"])
def test_what_appears_meanwhile_is_not_replaced(what: str, tmp_path: Path, source: Path) -> None:
    out = tmp_path / "out"

    def appear() -> None:
        if what == "folder":
            write(out / "precious.txt")
        elif what == "file":
            out.write_text("mine")
        elif what == "link":
            out.symlink_to(source)
        else:
            shutil.copytree(folder.staging, out)
            (out / "humming").mkdir()
            (out / "humming" / "manifest.json").write_text(MANIFEST)

    folder = OutputFolder(out, source_root=source, overwrite=False)
    with pytest.raises(OutputError) as caught:
        finish(folder, appear)
    expected = "is a file" if what == "file" else "exists already"
    assert str(caught.value).startswith(f"{out}: {expected}; choose ")
    if what == "folder":
        assert (out / "precious.txt").read_text() == "mine"
    assert not list(tmp_path.glob(".*"))


def test_what_appears_between_the_look_and_the_rename_is_not_replaced(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    folder = OutputFolder(out, source_root=source, overwrite=False)
    monkeypatch.setattr("humming_convert.output._refuse_existing", lambda *_: None)
    with pytest.raises(OutputError) as caught:
        finish(folder, lambda: write(out / "precious.txt"))
    assert str(caught.value) == f"{out}: exists already; choose another folder, or replace it with --overwrite"
    assert listing(out) == ["precious.txt"]


@pytest.mark.parametrize("look", ["before", "after"])
def test_overwrite_looks_again_at_the_end(
    look: str, tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    make(out, source, text="old")
    folder = OutputFolder(out, source_root=source, overwrite=True)
    if look == "after":  # the file comes after the look at OUT and before it is moved aside
        monkeypatch.setattr("humming_convert.output._refuse_existing", lambda *_: None)
    with pytest.raises(OutputError, match=r"would delete it: precious\.txt; move it away"):
        finish(folder, lambda: write(out / "precious.txt"))
    assert (out / "precious.txt").read_text() == "mine"
    assert (out / "config.json").read_text() == "old"
    assert not list(tmp_path.glob(".*"))


def test_a_signal_while_folders_are_renamed_waits(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    make(out, source, text="old")
    real = Path.rename

    def rename(self: Path, target: Path) -> Path:
        if self.name == "out":
            signal.raise_signal(signal.SIGINT)
        return real(self, target)

    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(KeyboardInterrupt):
        make(out, source, overwrite=True, text="new")
    assert (out / "config.json").read_text() == "new"


def test_a_staging_folder_that_another_run_replaced_is_left_alone(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lock is got on a folder that another run has removed meanwhile, and made anew."""
    staging = tmp_path / ".out.humming-partial"
    staging.mkdir()
    real = fcntl.flock
    others: list[int] = []

    def flock(descriptor: int, flags: int) -> None:
        real(descriptor, flags)
        if not others:
            shutil.rmtree(staging)
            staging.mkdir()
            (staging / "theirs").write_text("theirs")
            others.append(os.open(staging, os.O_RDONLY))
            real(others[0], fcntl.LOCK_EX)

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(OutputError, match="another run is writing this output"):
        make(tmp_path / "out", source)
    os.close(others[0])
    assert listing(staging) == ["theirs"]


def test_out_that_is_a_link_to_itself(tmp_path: Path, source: Path) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    assert refused(tmp_path / "loop", source).startswith(f"{tmp_path}/loop: ")
    assert refused(tmp_path / "loop" / "out", source).startswith(f"{tmp_path}/loop/out: ")
