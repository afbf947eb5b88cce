"""Which module may import which, read off the syntax tree of every module. Nothing is imported to find out.

The rules hold the two programs apart and keep the decisions pure. What is not listed as allowed is forbidden,
so that a new way to do I/O need not be thought of here first.
"""

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

# Modules that only compute. A pure layer may use these and its own kind, and nothing else.
_PURE_MODULES: Final = (
    *("__future__", "abc", "base64", "binascii", "bisect", "collections", "contextlib", "dataclasses"),
    *(
        "datetime",
        "enum",
        "fnmatch",
        "functools",
        "hashlib",
        "heapq",
        "hmac",
        "ipaddress",
        "itertools",
        "json",
    ),
    *("math", "operator", "re", "shlex", "string", "struct", "textwrap", "tomllib", "types", "typing", "unicodedata"),
    *("http.HTTPStatus", "pathlib.PurePosixPath", "urllib.parse", "zlib", "idna", "msgspec", "orjson"),
)
# What reads, prints or waits without an import.
_IMPURE_BUILTINS: Final = frozenset({"open", "print", "input", "breakpoint", "exec", "eval"})
# The clock, reached through a pure module.
_CLOCKS: Final = frozenset({"now", "utcnow", "today"})
_PROGRAMS: Final = ("gateway", "control")


@dataclass(frozen=True, slots=True)
class Layer:
    """Modules under `prefix`, unless an earlier layer holds them, may import `project` modules of ours."""

    prefix: str
    project: tuple[str, ...]
    pure: bool = False


_CONTRACT_VALUES: Final = tuple(f"gateway.contract.{name}" for name in ("ids", "limits", "opinion", "policy"))
LAYERS: Final = (
    Layer("gateway.core", ("gateway.core", *_CONTRACT_VALUES), pure=True),
    Layer("gateway.contract", ("gateway.contract",)),
    Layer("gateway.runtime", ("gateway.runtime", "gateway.contract")),
    Layer("gateway", ("gateway",)),
    Layer("control.plan", ("control.plan", "control.spec", *_CONTRACT_VALUES), pure=True),
    # What may be asked of a sandbox is judged by the gateway's own parser of rules, and by nothing else of it (ADR 5).
    Layer("control.spec", ("control.spec", *_CONTRACT_VALUES, "gateway.core.rules"), pure=True),
    Layer("control", ("control", "gateway.contract", "gateway.runtime")),
)


def violations(root: Path) -> list[str]:
    """Return one sentence, with file and line, for each import under `root` that the layers do not allow."""
    found = []
    for program in _PROGRAMS:
        for path in sorted((root / program).rglob("*.py")):
            module = _module_name(path.relative_to(root))
            layer = next(layer for layer in LAYERS if _is_under(module, layer.prefix))
            tree = ast.parse(path.read_text(), filename=str(path))
            for line, problem in _problems(tree, module, path.name == "__init__.py", layer):
                found.append(f"{path.relative_to(root)}:{line}: {layer.prefix} {problem}")
    return found


def third_party_imports(root: Path) -> dict[str, str]:
    """Return the packages that our programs import from outside, each with one file that does."""
    found: dict[str, str] = {}
    for program in _PROGRAMS:
        for path in sorted((root / program).rglob("*.py")):
            module = _module_name(path.relative_to(root))
            for _, name in _imports(ast.parse(path.read_text()), module, path.name == "__init__.py"):
                top = name.split(".")[0]
                if top not in sys.stdlib_module_names and top not in _PROGRAMS:
                    found.setdefault(top, str(path.relative_to(root)))
    return found


def _problems(tree: ast.Module, module: str, is_package: bool, layer: Layer) -> Iterator[tuple[int, str]]:
    for line, name in _imports(tree, module, is_package):
        if name.split(".")[0] in _PROGRAMS:
            if not any(_is_under(name, allowed) for allowed in layer.project):
                yield line, f"imports {name}; of ours it may import only {', '.join(layer.project)}"
        elif name.split(".")[0] in ("tests", "bench", "scripts"):
            yield line, f"imports {name}, which is not part of a program"
        elif layer.pure and not any(_is_under(name, allowed) for allowed in _PURE_MODULES):
            yield line, f"imports {name}, which is not known to be pure"
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        match node.func:
            case ast.Name("__import__") | ast.Attribute(attr="import_module"):
                yield node.lineno, "imports by a computed name, which no rule can follow"
            case ast.Name(name) if layer.pure and name in _IMPURE_BUILTINS:
                yield node.lineno, f"calls {name}()"
            case ast.Attribute(attr=name) if layer.pure and name in _CLOCKS:
                yield node.lineno, f"reads the clock by {name}()"


def _imports(tree: ast.Module, module: str, is_package: bool) -> Iterator[tuple[int, str]]:
    """Yield every imported module's full name;

    for `from package import name`, `package.name` (it may be a module).
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            source = node.module or ""
            if node.level:
                parents = module.split(".") if is_package else module.split(".")[:-1]
                parents = parents[: len(parents) - (node.level - 1)]
                source = ".".join([*parents, source]).rstrip(".")
            for alias in node.names:
                yield node.lineno, f"{source}.{alias.name}"


def _module_name(path: Path) -> str:
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _is_under(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(f"{prefix}.")
