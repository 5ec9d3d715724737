"""Who may import whom, read from the source: one direction, light fronts, no assert for user input."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CONVERTER = ROOT / "converter" / "humming_convert"
LOADER = ROOT / "loader" / "humming_loader"
FILES = sorted([*CONVERTER.rglob("*.py"), *LOADER.rglob("*.py")])

# What may be imported when a module is loaded, before any command runs.
LIGHT = (
    "activation", "cli", "errors", "expert_names", "families", "families_more", "family", "fused_view", "hf_config",
    "layer_choice", "layer_index", "layer_rules", "model_card", "options", "pipeline", "plan", "plan_build", "progress",
    "report", "resolve", "safetensors_header", "source", "sublayer_plan", "target", "writer",
)  # fmt: skip
HEAVY = {"torch", "numpy", "humming", "vllm", "compressed_tensors"}


def imports(tree: ast.AST, *, only_top: bool = False) -> Iterator[str]:
    """Module names that a file imports."""
    nodes = tree.body if only_top and isinstance(tree, ast.Module) else ast.walk(tree)
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


def parsed(path: Path) -> ast.Module:
    """The file's syntax tree."""
    return ast.parse(path.read_text(), str(path))


@pytest.mark.parametrize("path", sorted(LOADER.rglob("*.py")), ids=lambda path: path.stem)
def test_loader_never_imports_the_converter(path: Path) -> None:
    assert not [name for name in imports(parsed(path)) if name.split(".")[0] == "humming_convert"]


@pytest.mark.parametrize("name", LIGHT)
def test_light_modules_load_nothing_heavy(name: str) -> None:
    loaded = {module.split(".")[0] for module in imports(parsed(CONVERTER / f"{name}.py"), only_top=True)}
    assert not loaded & HEAVY


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_product_code_has_no_assert_and_no_star_import(path: Path) -> None:
    tree = parsed(path)
    assert not [node.lineno for node in ast.walk(tree) if isinstance(node, ast.Assert)]
    assert not [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.names[0].name == "*"]


def test_only_the_host_imports_humming() -> None:
    importers = {
        path.relative_to(CONVERTER)
        for path in CONVERTER.rglob("*.py")
        if any(name.split(".")[0] == "humming" for name in imports(parsed(path)))
    }
    assert importers <= {Path("host/target.py")}
