"""Who may import whom, read from the source: a layer sees only what lies below it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "src" / "ostinato"

LEVELS = (
    ("errors",),
    ("request",),
    ("step",),
    ("kernels", "tokenizer", "weights", "kv", "graphs"),
    ("models", "sampling", "connectors"),
    ("scheduler", "runner"),
    ("config",),
    ("engine",),
    ("server",),
    ("cli",),
)
LEAVES = {"progress"}
"""May be imported by all, and import nothing of the package."""

SIBLINGS = {("weights", "tokenizer")}
"""A checkpoint carries its tokenizer: the one pair on a level of which one may import the other."""

NO_TORCH = (
    "config",
    "errors",
    "request",
    "step",
    "graphs.mode",
    "graphs.buckets",
    "graphs.dispatch",
    "graphs.ladder",
    "graphs.tuning",
    "kv.block_pool",
    "kv.prefix",
    "kv.manager",
    "models.config",
    "runner.layout",
    "sampling.rows",
    "engine.stats",
    "connectors.files",
    "connectors.tcp",
    "cli.main",
)
HEAVY = {"torch", "triton", "transformers", "tokenizers"}


@dataclass(frozen=True, slots=True)
class Import:
    name: str
    line: int
    at_import_time: bool


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(tree: ast.Module) -> Iterator[Import]:
    """All imports; those under TYPE_CHECKING or inside a function do not happen when the module is imported."""

    def walk(node: ast.AST, now: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                yield from (Import(alias.name, child.lineno, now) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                assert child.level == 0, f"relative import in line {child.lineno}"
                base = child.module or ""
                yield Import(base, child.lineno, now)
                # `from package import module` imports the module too, if it is one
                yield from (Import(f"{base}.{alias.name}", child.lineno, now) for alias in child.names)
            elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                yield from walk(child, False)
            else:
                deferred = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
                yield from walk(child, now and not deferred)

    yield from walk(tree, True)


TREES = {module_name(path): ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}
IMPORTS = {name: list(imports_of(tree)) for name, tree in TREES.items()}


def part_of(module: str) -> str:
    """`ostinato.kv.manager` -> `kv`."""
    return module.split(".")[1] if "." in module else ""


def level_of(part: str) -> int:
    return next(index for index, parts in enumerate(LEVELS) if part in parts)


def test_every_module_has_a_level() -> None:
    known = {part for parts in LEVELS for part in parts} | LEAVES | {""}
    assert {part_of(module) for module in TREES} <= known


def refusal(importer: str, imported: str) -> str | None:
    """Why part `importer` may not import part `imported`."""
    if imported == importer or imported in LEAVES:
        return None
    if importer in LEAVES:
        return "a leaf imports nothing of the package"
    if level_of(imported) > level_of(importer):
        return "imports go down only"
    if level_of(imported) == level_of(importer) and (importer, imported) not in SIBLINGS:
        return "parts of one level do not know each other"
    return None


def test_imports_go_down_only() -> None:
    wrong = [
        f"{module}:{found.line} imports {found.name}: {why}"
        for module, imports in IMPORTS.items()
        if part_of(module)  # the package's own `__init__` names its public classes, lazily
        for found in imports
        if found.name in TREES and part_of(found.name)
        if (why := refusal(part_of(module), part_of(found.name)))
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("importer", "imported", "allowed"),
    [
        ("runner", "kv", True),
        ("runner", "scheduler", False),
        ("kv", "runner", False),
        ("weights", "tokenizer", True),
        ("tokenizer", "weights", False),
        ("step", "request", True),
        ("request", "step", False),
        ("engine", "progress", True),
        ("progress", "errors", False),
    ],
)
def test_the_rule_itself(importer: str, imported: str, allowed: bool) -> None:
    assert (refusal(importer, imported) is None) == allowed


def reached_by(module: str) -> dict[str, str]:
    """Everything that importing `module` imports, packages on the way included, and by whom."""
    reached: dict[str, str] = {}
    queue = [module]
    while queue:
        current = queue.pop()
        parents = [current.rsplit(".", depth)[0] for depth in range(1, current.count(".") + 1)]
        names = [found.name for found in IMPORTS[current] if found.at_import_time]
        for name in names + parents:
            if name not in reached:
                reached[name] = current
                if name in TREES:
                    queue.append(name)
    return reached


def pure_modules() -> list[str]:
    scheduler = [module for module in TREES if part_of(module) == "scheduler"]
    return [f"ostinato.{name}" for name in NO_TORCH] + scheduler


@pytest.mark.parametrize("module", pure_modules())
def test_pure_modules_import_no_torch(module: str) -> None:
    reached = reached_by(module)
    heavy = {name: importer for name, importer in reached.items() if name.split(".")[0] in HEAVY}
    assert not heavy


def test_reached_by_sees_through_packages() -> None:
    assert "ostinato.errors" in reached_by("ostinato.scheduler")
    assert "torch" in reached_by("ostinato.engine.llm")


def test_no_global_statement() -> None:
    wrong = [
        f"{module}:{node.lineno}"
        for module, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Global)
    ]
    assert not wrong


def test_the_environment_is_not_read() -> None:
    """Options come through `EngineConfig` and the command line; should one ever need a variable, one place reads it."""

    def names(node: ast.AST) -> set[str]:
        if isinstance(node, ast.Attribute):
            return {node.attr}
        return {alias.name for alias in node.names} if isinstance(node, ast.ImportFrom) else set()

    readers = {
        module for module, tree in TREES.items() for node in ast.walk(tree) if names(node) & {"environ", "getenv"}
    }
    assert len(readers) <= 1, readers
