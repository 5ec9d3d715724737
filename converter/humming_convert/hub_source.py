"""A checkpoint on the Hub, opened by its config files and by the headers of its weight files alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from types import MappingProxyType

from humming_convert import hf_config
from humming_convert.errors import CheckpointError, Problem
from humming_convert.hub_id import HubId, Origin
from humming_convert.model_folder import choose_weight_files, is_kept, is_there, read_json
from humming_convert.safetensors_header import (
    MAX_HEADER_BYTES,
    FileHeader,
    SourceFile,
    header_length,
    parse_header,
    read_header,
)
from humming_convert.source import Checkpoint, find_quantization, merge_headers, open_checkpoint
from humming_loader.errors import HubError
from humming_loader.hub import TIMEOUT, explained, fetch, note_commit, noted_commit, snapshot_folder

CONFIG_FILE = "config.json"
_THREADS = 8
# A guess at the bytes of one tensor in a header beside its name, and of a header about which nothing is known.
_ENTRY_BYTES = 100
_UNKNOWN_HEADER_BYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class Listing:
    """A repository at one commit: `sizes` of its files by name, `sha256` of the large ones; `root` is its snapshot."""

    repo: str
    commit: str
    sizes: Mapping[str, int]
    sha256: Mapping[str, str]
    root: Path


def open_hub_checkpoint(source: HubId, quant_config: Path | None = None) -> Checkpoint:
    """The checkpoint in a repository. Only headers, the index and config files are fetched.

    With HF_HUB_OFFLINE set it is the snapshot in the cache. Raises CheckpointError and HubError.
    """
    listing = list_repository(source)
    if listing is None:
        return open_checkpoint(cached_snapshot(source), quant_config)

    top = [name for name in listing.sizes if "/" not in name]

    def read(name: str) -> dict[str, object]:
        return read_json(fetch(listing.repo, name, listing.commit), name)

    names, index = choose_weight_files(top, str(source), read)
    for name in (CONFIG_FILE, *(name for name, _ in hf_config.QUANT_FILES)):
        if name in listing.sizes:
            fetch(listing.repo, name, listing.commit)
    problems: list[Problem] = []
    headers = _read_headers(listing, names, index, problems)
    tensors = merge_headers(headers, index, problems)
    root = listing.root
    config = read_json(root / CONFIG_FILE, CONFIG_FILE) if is_there(root, CONFIG_FILE) else None
    quantization, where = find_quantization(root, config, quant_config)
    return Checkpoint(
        root=root,
        is_single_file=False,
        files=tuple(header.file for header in headers),
        tensors=MappingProxyType(tensors),
        config=config,
        quantization=quantization,
        quantization_origin=where,
        side_files=tuple(sorted(name for name in top if is_kept(name))),
        metadata={header.file.name: header.metadata for header in headers},
        left_out=_left_out(listing, names),
        origin=Origin(listing.repo, listing.commit, listing.sha256, is_remote=True),
    )


def fetch_side_files(checkpoint: Checkpoint) -> None:
    """Bring the files that are copied (tokenizer, licence, ...) to `checkpoint.root`. Raises HubError."""
    origin = checkpoint.origin
    if origin is not None and origin.is_remote:
        for name in checkpoint.side_files:
            fetch(origin.repo, name, origin.commit)


def list_repository(source: HubId) -> Listing | None:
    """The repository's files at the commit that `source` names now; None while the client is offline."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import OfflineModeIsEnabled

    try:
        with explained(str(source), source.repo):
            info = HfApi().model_info(source.repo, revision=source.revision, files_metadata=True, timeout=TIMEOUT)
    except HubError as error:
        if isinstance(error.__cause__, OfflineModeIsEnabled):
            return None
        raise
    if not info.sha or info.siblings is None:
        raise CheckpointError([Problem(str(source), "a commit and its files", "a repository without")])
    files = {file.rfilename: file for file in info.siblings}
    sizes = {name: file.size or 0 for name, file in files.items()}
    digests = {name: file.lfs.sha256 for name, file in files.items() if file.lfs is not None}
    note_commit(source.repo, source.revision, info.sha)
    return Listing(source.repo, info.sha, sizes, digests, snapshot_folder(source.repo, info.sha))


def cached_snapshot(source: HubId) -> Path:
    """The snapshot folder of what was last downloaded for `source`. Raises CheckpointError when there is none."""
    commit = noted_commit(source.repo, source.revision) or source.revision or "main"
    snapshot = snapshot_folder(source.repo, commit)
    if not snapshot.is_dir():
        hint = f"fetch it once: hf download {source.repo}"
        raise CheckpointError([Problem(str(source), "it in the cache, since HF_HUB_OFFLINE is set", "nothing", hint)])
    return snapshot


def _left_out(listing: Listing, names: tuple[str, ...]) -> tuple[str, ...]:
    used = {PurePosixPath(name).parts[0] for name in names}
    found = {f"{PurePosixPath(name).parts[0]}/" if "/" in name else name for name in listing.sizes}
    kept = {name for name in found if "/" not in name and (is_kept(name) or name.endswith(".index.json"))}
    others = found - kept - used - {f"{name}/" for name in used} - {"config.json"}
    return tuple(sorted(name for name in others if not name.startswith(".")))


def _read_headers(
    listing: Listing, names: tuple[str, ...], index: Mapping[str, str] | None, problems: list[Problem]
) -> list[FileHeader]:
    guesses = Counter[str]()
    for tensor, file in (index or {}).items():
        guesses[file] += len(tensor.encode()) + _ENTRY_BYTES

    def read(name: str) -> FileHeader | list[Problem]:
        try:
            return _read_header(listing, name, guesses.get(name, _UNKNOWN_HEADER_BYTES) + _ENTRY_BYTES)
        except CheckpointError as error:
            return list(error.problems)

    headers = []
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="header") as pool:
        for found in pool.map(read, names):
            if isinstance(found, FileHeader):
                headers.append(found)
            else:
                problems += found
    return headers


def _read_header(listing: Listing, name: str, guess: int) -> FileHeader:
    """The header of a weight file: from the cache, or by one range request, two where the guess was too small."""
    if name not in listing.sizes:
        raise CheckpointError([Problem(name, "a file of the repository, as the index says", "none")])
    path = listing.root / name
    if path.exists():
        header = read_header(path, name)
        return FileHeader(_remote(name, header.file.size), header.tensors, header.metadata)
    source = _remote(name, listing.sizes[name])
    data = _first_bytes(listing, name, min(guess, source.size))
    needed = 8 + header_length(data[:8], source)
    if len(data) < needed:
        data = _first_bytes(listing, name, needed)
    return parse_header(data[:8], data[8:needed], source)


def _remote(name: str, size: int) -> SourceFile:
    return SourceFile(name, size, -1, -1, -1)


def _first_bytes(listing: Listing, name: str, count: int) -> bytes:
    """The first `count` bytes of a file; a server that ignores ranges is not read further than that."""
    from huggingface_hub import hf_hub_url
    from huggingface_hub.utils import (  # type: ignore[attr-defined]
        build_hf_headers,
        hf_raise_for_status,
        http_stream_backoff,
    )

    if count <= 0 or count > 8 + MAX_HEADER_BYTES:
        raise CheckpointError([Problem(name, "a safetensors file", f"a file of {listing.sizes[name]} bytes")])
    headers = build_hf_headers() | {"Range": f"bytes=0-{count - 1}", "Accept-Encoding": "identity"}
    url = hf_hub_url(listing.repo, name, revision=listing.commit)
    data = bytearray()
    with (
        explained(f"{listing.repo}: {name}", listing.repo),
        http_stream_backoff("GET", url, headers=headers, timeout=TIMEOUT) as response,
    ):
        hf_raise_for_status(response)
        for chunk in response.iter_bytes():
            data += chunk
            if len(data) >= count:
                break
    return bytes(data[:count])
