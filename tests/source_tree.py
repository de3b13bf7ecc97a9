"""The packages' source files and what each imports, read without importing them."""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGES = ("learn", "pipelines", "serve_table")


@dataclass(frozen=True)
class Import:
    """`name` is the full dotted module; top_level: done when the file itself is imported."""

    name: str
    line: int
    top_level: bool

    @property
    def package(self) -> str:
        return self.name.partition(".")[0]


def files(package: str) -> list[Path]:
    """The package's Python files, relative to the root."""
    return sorted(path.relative_to(ROOT) for path in (ROOT / package).rglob("*.py"))


def module_name(path: Path) -> str:
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def modules() -> dict[str, Path]:
    """Dotted name to file, of all packages."""
    return {module_name(path): path for package in PACKAGES for path in files(package)}


@cache
def imports(path: Path) -> list[Import]:
    """Every import in the file but those for type checkers only; `from package import module` names the module."""
    known = modules()
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    return [item for node in tree.body for item in _imports(node, path, known, top_level=True)]


def _imports(node: ast.AST, path: Path, known: dict[str, Path], top_level: bool) -> Iterator[Import]:
    if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
        children: list[ast.AST] = list(node.orelse)
    else:
        children = list(ast.iter_child_nodes(node))
    if isinstance(node, ast.Import):
        yield from (Import(alias.name, node.lineno, top_level) for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        base = ".".join(module_name(path).split(".")[: -node.level]) if node.level else ""
        base = ".".join(part for part in (base, node.module) if part)
        for alias in node.names:
            inner = f"{base}.{alias.name}"
            yield Import(inner if inner in known else base, node.lineno, top_level)
    inside = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
    for child in children:
        yield from _imports(child, path, known, top_level and not inside)


def summary(path: Path) -> str:
    """The first sentence, or clause before a semicolon, of a module's docstring."""
    text = ast.get_docstring(ast.parse((ROOT / path).read_text(encoding="utf-8"))) or ""
    first = " ".join(text.partition("\n\n")[0].split())
    return re.split(r"(?<=[.;])\s", first)[0].rstrip(".;")


def file_map_text() -> str:
    """The README's file map: every folder and file of the packages with its docstring's summary."""
    lines: list[str] = []
    folders = sorted({path.parent for package in PACKAGES for path in files(package)}, key=map_order)
    for folder in folders:
        names = [path for path in files(folder.parts[0]) if path.parent == folder and path.name != "__init__.py"]
        width = max((len(path.name) for path in names), default=0)
        lines.append(f"{folder.as_posix()}/  {summary(folder / '__init__.py')}")
        lines += [f"  {path.name:<{width}}  {summary(path)}" for path in names]
    return "\n".join(lines)


def map_order(folder: Path) -> tuple[int, str]:
    return ("serve_table", "learn", "pipelines").index(folder.parts[0]), folder.as_posix()


def with_file_map(readme: str) -> str:
    """The README with its file map made anew."""
    before, _, rest = readme.partition("## File map\n\n```text\n")
    return f"{before}## File map\n\n```text\n{file_map_text()}\n```{rest.partition('```')[2]}"


if __name__ == "__main__":  # `make readme`
    path = ROOT / "README.md"
    path.write_text(with_file_map(path.read_text(encoding="utf-8")), encoding="utf-8")
