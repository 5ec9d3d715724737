"""The manifest of kernels and the digest over headers: strict, and the same wherever the files lie."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from tests.support.kernel_host import manifest_of

from humming_loader.entries import FileEntry
from humming_loader.errors import KernelError, ManifestError
from humming_loader.headers import Headers
from humming_loader.kernel_entries import Identity, KernelEntry, from_json, to_json
from humming_loader.toolchain import build_of, without_folders

IDENTITY = Identity(
    source="0" * 64,
    expression="f<1>",
    flags=("-std=c++17",),
    headers="1" * 64,
    arch="90a",
    compiler="nvrtc 13.0 build",
    humming="0.1.19",
    tools="2" * 64,
)
ENTRY = KernelEntry("process_input", FileEntry("humming/kernels/a.cubin", 12, "3" * 64), IDENTITY)


def test_round_trip() -> None:
    manifest = manifest_of(ENTRY)
    assert from_json(to_json(manifest)) == manifest
    assert manifest.files() == ("humming/kernels/manifest.json", "humming/kernels/a.cubin")


@pytest.mark.parametrize(
    ("edit", "field"),
    [
        (lambda d: d.update(more=1), "manifest"),
        (lambda d: d.update(format_version=2), "format_version"),
        (lambda d: d["producer"].update(name="another"), "producer.name"),
        (lambda d: d["target"].update(cuda=[13]), "target.cuda"),
        (lambda d: d.update(gemm_types=[1]), "gemm_types[0]"),
        (lambda d: d["kernels"][0].update(kind="repack"), "kernels[0].kind"),
        (lambda d: d["kernels"][0]["file"].update(name="../x.cubin"), "kernels[0].file.name"),
        (lambda d: d["kernels"][0]["file"].update(name="humming/x.cubin"), "kernels[0].file.name"),
        (lambda d: d["kernels"][0]["file"].update(size=0), "kernels[0].file.size"),
        (lambda d: d["kernels"][0]["identity"].update(flags=[None]), "kernels[0].identity.flags[0]"),
        (lambda d: d["kernels"][0]["identity"].pop("headers"), "kernels[0].identity.headers"),
        (lambda d: d["kernels"][0]["identity"].update(tools="x"), "kernels[0].identity.tools"),
    ],
)
def test_strict(edit: object, field: str) -> None:
    document = json.loads(to_json(manifest_of(ENTRY)))
    assert callable(edit)
    edit(document)
    with pytest.raises(ManifestError) as caught:
        from_json(json.dumps(document))
    assert caught.value.field == field


@pytest.mark.parametrize("name", list(Identity.__slots__))
def test_every_field_tells_kernels_apart(name: str) -> None:
    value = ("other",) if name == "flags" else "other"
    other = replace(IDENTITY, **{name: value})  # type: ignore[arg-type]
    assert other != IDENTITY
    assert list(IDENTITY.differences(other)) == [name]


def write(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        path = folder / name.replace("__", "/").replace("_h", ".h")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """a.h includes sub/b.h, that one (quoted) c.h beside it, and by `..` d.h."""
    return write(
        tmp_path / "tree",
        a_h="  #  include <sub/b.h>  // why\n/* #include <gone.h> */\n",
        sub__b_h='#if 0\n#include "c.h"\n#endif\n#include "../d.h"\n',
        sub__c_h="c",
        d_h="d",
        e_h="e",
    )


def test_what_a_source_can_include(tree: Path) -> None:
    headers = Headers([tree], {"given.h": "#include <e.h>"})
    assert {path.name for path in headers.files("#include <a.h>\n")} == {"a.h", "b.h", "c.h", "d.h"}
    assert {path.name for path in headers.files("#include <given.h>\n")} == {"e.h"}
    assert headers.files("int a;\n") == ()


def test_a_digest_is_the_same_anywhere(tree: Path, tmp_path: Path) -> None:
    source = "#include <a.h>\n#include <given.h>\n"
    first = Headers([tree], {"given.h": "1"}).digest(source)
    copy = shutil.copytree(tree, tmp_path / "far" / "away", copy_function=shutil.copyfile)
    assert Headers([copy], {"given.h": "1"}).digest(source) == first
    assert Headers([copy / "sub" / ".."], {"given.h": "1"}).digest(source) == first
    assert Headers([copy], {"given.h": "2"}).digest(source) != first
    assert Headers([tmp_path, copy], {"given.h": "1"}).digest(source) != first


@pytest.mark.parametrize("name", ["a.h", "sub/b.h", "sub/c.h", "d.h"])
def test_one_byte_of_a_header(tree: Path, name: str) -> None:
    before = Headers([tree], {}).digest("#include <a.h>\n")
    (tree / name).write_text((tree / name).read_text() + " ")
    assert Headers([tree], {}).digest("#include <a.h>\n") != before


def test_a_name_that_is_nowhere_counts(tree: Path) -> None:
    assert Headers([tree], {}).digest("#include <x.h>\n") != Headers([tree], {}).digest("#include <y.h>\n")
    before = Headers([tree], {}).digest("#include <a.h>\n#include <x.h>\n")
    (tree / "x.h").touch()
    assert Headers([tree], {}).digest("#include <a.h>\n#include <x.h>\n") != before


def test_a_second_file_of_the_same_name_counts(tree: Path, tmp_path: Path) -> None:
    second = write(tmp_path / "second", d_h="other")
    before = Headers([tree, second], {}).digest("#include <d.h>\n")
    (second / "d.h").write_text("another")
    assert Headers([tree, second], {}).digest("#include <d.h>\n") != before


def test_includes_by_macro_are_refused(tree: Path) -> None:
    (tree / "d.h").write_text("#include NAME\n")
    with pytest.raises(KernelError, match=r"header 0/d\.h: expected an include of a name, found #include NAME"):
        Headers([tree], {}).digest("#include <a.h>\n")


@pytest.mark.parametrize("before", [0, 10, (1 << 20) - 20, 1 << 20, 3 << 20])
@pytest.mark.parametrize("after", [0, 1, (1 << 20) - 10, 1 << 20])
def test_the_build_is_found_anywhere_in_the_library(tmp_path: Path, before: int, after: int) -> None:
    path = tmp_path / "lib"
    path.write_bytes(b"\0" * before + b"cuda_13.0.r13.0/compiler.36424714_0" + b"\0" * after)
    assert build_of(path) == "cuda_13.0.r13.0/compiler.36424714_0"


def test_a_library_without_a_build_is_known_by_its_content(tmp_path: Path) -> None:
    path = tmp_path / "lib"
    path.write_bytes(b"one")
    assert build_of(path) == "7692c3ad3540bb803c020b3aee66cd8887123234ea0c6e7143c0add73ff431ed"


def test_include_folders_are_no_flags() -> None:
    assert without_folders(["-std=c++17", "-I/a/b", "-DX=1"]) == ("-std=c++17", "-DX=1")
