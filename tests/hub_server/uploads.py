"""The writing half of the test Hub: repositories, branches, large objects, commits and pull requests."""

from __future__ import annotations

import json
import re
from math import ceil
from typing import TYPE_CHECKING, Any

import yaml

from tests.hub_server.answers import Answer, error, json_answer
from tests.hub_server.store import LFS_LIMIT

if TYPE_CHECKING:
    from tests.hub_server.server import Handler

_REPO_ID = re.compile(r"[\w.-]+/[\w.-]+")
_RELATIONS = {"adapter", "merge", "quantized", "finetune"}
_LICENSES = {"apache-2.0", "mit", "other", "llama3", "gemma", "cc-by-nc-4.0", "openrail"}


def create_repo(handler: Handler, match: re.Match[str]) -> Answer:
    """POST /api/repos/create"""
    wanted = _json(handler)
    name = f"{wanted['organization']}/{wanted['name']}"
    needed = handler.server.required_token
    if needed is not None and handler.token != needed:
        return error(403 if handler.token else 401, "You don't have the rights to create a model under this namespace")
    url = {"url": f"{handler.server.url}/{name}", "name": name}
    if name in handler.server.store.repositories:
        return json_answer(url | {"error": "You already created this model repo"}, 409)
    is_private = wanted.get("visibility") == "private" or bool(wanted.get("private"))
    handler.server.store.create(name, private=is_private)
    return json_answer(url)


def create_branch(handler: Handler, match: re.Match[str]) -> Answer:
    """POST /api/models/ORG/NAME/branch/BRANCH"""
    repository = handler.repository(match["repo"], write=True)
    if isinstance(repository, Answer):
        return repository
    if match["branch"] in repository.branches:
        return error(409, "Reference already exists")
    repository.branches[match["branch"]] = [repository.branches["main"][-1]]
    return json_answer({}, 201)


def validate_card(handler: Handler, match: re.Match[str]) -> Answer:
    """POST /api/validate-yaml: what the Hub's specification of model card metadata asks of the fields used here."""
    text = _json(handler)["content"]
    parts = text.split("---\n")
    problems = []
    data = yaml.safe_load(parts[1]) if len(parts) > 2 else None
    if not isinstance(data, dict):
        return json_answer({"errors": [], "warnings": [{"message": "empty or missing yaml metadata in repo card"}]})
    base = data.get("base_model", [])
    for name in base if isinstance(base, list) else [base]:
        if not isinstance(name, str) or not _REPO_ID.fullmatch(name):
            problems.append('"base_model" must be a valid model id')
    if data.get("base_model_relation", "quantized") not in _RELATIONS:
        problems.append('"base_model_relation" must be one of adapter, merge, quantized, finetune')
    if data.get("license", "mit") not in _LICENSES:
        problems.append('"license" must be one of a list')
    if data.get("license") == "other" and not data.get("license_name"):
        problems.append('"license_name" is required with "other"')
    tags = data.get("tags", [])
    if not isinstance(tags, list) or not all(isinstance(tag, str) for tag in tags):
        problems.append('"tags" must be an array of strings')
    if not isinstance(data.get("library_name", ""), str):
        problems.append('"library_name" must be a string')
    found = {"errors": [{"message": problem} for problem in problems], "warnings": []}
    return json_answer(found, 400 if problems else 200)


def preupload(handler: Handler, match: re.Match[str]) -> Answer:
    """POST /api/models/ORG/NAME/preupload/REVISION: which files are large, and what is there of their names."""
    here = handler.at(match["repo"], match["rev"], write="create_pr" not in handler.query)
    if isinstance(here, Answer):
        return here
    rows = []
    for file in _json(handler)["files"]:
        is_large = file["path"].endswith(".safetensors") or file["size"] > LFS_LIMIT
        there = here[1].files.get(file["path"])
        rows.append(
            {
                "path": file["path"],
                "uploadMode": "lfs" if is_large else "regular",
                "shouldIgnore": False,
                "oid": there.oid if there is not None else None,
            }
        )
    return json_answer({"files": rows})


def lfs_batch(handler: Handler, match: re.Match[str]) -> Answer:
    """POST /ORG/NAME.git/info/lfs/objects/batch: where to send each object that is not there yet."""
    repository = handler.repository(match["repo"], write="create_pr" not in handler.query)
    if isinstance(repository, Answer):
        return repository
    objects: list[dict[str, Any]] = []
    for wanted in _json(handler)["objects"]:
        oid, size, url = wanted["oid"], wanted["size"], f"{handler.server.storage_url}/lfs/{wanted['oid']}"
        row: dict[str, Any] = {"oid": oid, "size": size}
        if oid not in handler.server.store.objects:
            upload: dict[str, Any] = {"href": url}
            part = handler.server.part_bytes
            if size > part:
                parts = {str(number): f"{url}/{number}" for number in range(1, ceil(size / part) + 1)}
                upload = {"href": f"{url}/complete", "header": {"chunk_size": str(part)} | parts}
            row["actions"] = {"upload": upload, "verify": {"href": f"{url}/verify"}}
        objects.append(row)
    return json_answer({"transfer": "multipart", "objects": objects})


def put_object(handler: Handler, match: re.Match[str]) -> Answer:
    """PUT /lfs/OID or /lfs/OID/PART"""
    body, store = handler.body or b"", handler.server.store
    if match["part"]:
        store.parts.setdefault(match["oid"], {})[int(match["part"])] = body
    elif not store.keep_object(match["oid"], body):
        return error(422, "these bytes are others")
    return Answer(200, {"ETag": f'"part-{match["part"]}-{len(body)}"'})


def complete(handler: Handler, match: re.Match[str]) -> Answer:
    """POST /lfs/OID/complete: the parts become the object."""
    store, parts = handler.server.store, handler.server.store.parts.get(match["oid"], {})
    named = _json(handler)["parts"]
    expected = [f'"part-{number}-{len(parts.get(number, b""))}"' for number in range(1, len(named) + 1)]
    if [part["etag"] for part in named] != expected:
        return error(400, "parts are missing")
    if not store.keep_object(match["oid"], b"".join(parts[number] for number in sorted(parts))):
        return error(422, "these bytes are others")
    del store.parts[match["oid"]]
    return json_answer({})


def verify(handler: Handler, match: re.Match[str]) -> Answer:
    """POST /lfs/OID/verify"""
    path = handler.server.store.objects.get(match["oid"])
    is_whole = path is not None and path.stat().st_size == _json(handler)["size"]
    return json_answer({}) if is_whole else error(404, "no such object")


def commit(handler: Handler, match: re.Match[str]) -> Answer:
    """POST /api/models/ORG/NAME/commit/REVISION: lines of JSON, all of them or nothing."""
    is_pull = "create_pr" in handler.query
    here = handler.at(match["repo"], match["rev"], write=not is_pull)
    if isinstance(here, Answer):
        return here
    repository, branch = here[0], match["rev"]
    if is_pull:
        repository.pulls += 1
        branch = f"refs/pr/{repository.pulls}"
    lines = [json.loads(line) for line in (handler.body or b"").splitlines()]
    done = handler.server.store.apply(repository, branch, lines, match["rev"])
    if done == "conflict":
        return error(412, "A commit has happened since. Please refresh and try again.")
    if isinstance(done, str):
        return error(400, done)
    url = f"{handler.server.url}/{repository.name}"
    pull = f"{url}/discussions/{repository.pulls}" if is_pull else None
    return json_answer({"commitUrl": f"{url}/commit/{done.oid}", "commitOid": done.oid, "pullRequestUrl": pull})


def _json(handler: Handler) -> Any:  # noqa: ANN401 - parsed JSON
    return json.loads(handler.body or b"{}")
