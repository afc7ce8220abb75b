"""What a Python file brings in, read from its text: nothing is imported to find out."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def module_name(path: Path) -> str:
    """`bitmtp_tvm/checkpoint/__init__.py` is `bitmtp_tvm.checkpoint`."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def modules(package: str) -> dict[str, Path]:
    """Every module of a package of this repository, by its dotted name."""
    return {module_name(path): path for path in sorted((ROOT / package).rglob("*.py"))}


def names_used(text: str, module: str, is_package: bool = False) -> set[str]:
    """Dotted names that the code of `module` refers to, inside functions too.

    `import a.b`, `from a import b` (as `a` and `a.b`), relative forms, `a.b.c` written out where
    `a` was imported, and the argument of `import_module("a.b")`. What only a type checker reads
    (`if TYPE_CHECKING:`) is left out.
    """
    package = module if is_package else module.rpartition(".")[0]
    names: set[str] = set()
    written: set[str] = set()
    for node in _run_time_nodes(ast.parse(text)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = _absolute(node, package)
            names |= {base} | {f"{base}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Attribute):
            written.add(_dotted(node))
        elif isinstance(node, ast.Call) and _last(node.func) in ("import_module", "__import__"):
            names |= {arg.value for arg in node.args if isinstance(arg, ast.Constant)}
    roots = {name.partition(".")[0] for name in names}
    return names | {name for name in written if name.partition(".")[0] in roots}


def _run_time_nodes(node: ast.AST) -> Iterator[ast.AST]:
    yield node
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and _last(child.test) == "TYPE_CHECKING":
            for other in child.orelse:
                yield from _run_time_nodes(other)
        else:
            yield from _run_time_nodes(child)


def _absolute(node: ast.ImportFrom, package: str) -> str:
    if not node.level:
        return node.module or ""
    parents = package.split(".")[: len(package.split(".")) - node.level + 1]
    return ".".join([*parents, *([node.module] if node.module else [])])


def _dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (base := _dotted(node.value)):
        return f"{base}.{node.attr}"
    return ""


def _last(node: ast.expr) -> str:
    return _dotted(node).rpartition(".")[2]


def within(name: str, packages: set[str]) -> bool:
    """True for a package's own name and for all below it."""
    return any(name == package or name.startswith(package + ".") for package in packages)
