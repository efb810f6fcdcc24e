"""The layout of the package: no circle of imports, small modules, few names at the top."""

import ast
import graphlib
import pathlib

ROOT = pathlib.Path(__file__).parents[1]
FILES = {
    file.relative_to(ROOT): ("jlade.conversion" if folder == "conversion" else folder, file)
    for folder in ("jlade", "conversion")
    for file in (ROOT / folder).rglob("*.py")
    if not file.is_relative_to(ROOT / "jlade" / "conversion")  # the link
}


def module_name(path, package):
    parts = list(path.with_suffix("").parts)
    parts[0] = package
    return ".".join(parts).removesuffix(".__init__")


MODULES = {module_name(path, package): file for path, (package, file) in FILES.items()}
MODULES["jlade"] = ROOT / "jlade" / "__init__.pyi"  # the imports that __init__.py makes when they are needed


def imported_by(name, file):
    """Returns the modules of the package that `file` imports anywhere, in functions too, but for type checks alone."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    typing_only = {
        node
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and getattr(block.test, "id", None) == "TYPE_CHECKING"
        for node in ast.walk(block)
    }
    for node in ast.walk(tree):
        if node in typing_only:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = ".".join(filter(None, ["jlade" if node.level else None, node.module]))
            for alias in node.names:
                whole = f"{module}.{alias.name}"
                yield whole if whole in MODULES else module


def test_no_import_leads_back():
    graph = {name: {n for n in imported_by(name, file) if n in MODULES} for name, file in MODULES.items()}
    assert graph["jlade.decoding.step"] > {"jlade.lookahead.block", "jlade.models.base"}, "the search finds imports"
    # The commands import the package itself, which imports no command.
    assert not any(name.startswith("jlade.cli") for name in reachable(graph, "jlade"))
    graphlib.TopologicalSorter(graph).prepare()  # raises a CycleError that names the circle


def reachable(graph, name):
    found, left = set(), [name]
    while left:
        for other in graph[left.pop()] - found:
            found.add(other)
            left.append(other)
    return found


def test_floors():
    """Models and the algorithm import neither each other nor anything above them."""
    below = {
        "jlade.candidates": ("jlade.config", "jlade.candidates"),
        "jlade.lookahead": ("jlade.config", "jlade.candidates", "jlade.lookahead"),
        "jlade.models": ("jlade.devices.mesh", "jlade.devices.sheet", "jlade.files", "jlade.models"),
        "jlade.decoding": (
            *("jlade.candidates", "jlade.config", "jlade.decoding", "jlade.devices.mesh", "jlade.lookahead"),
            "jlade.models",
        ),
        "jlade.conversion": (
            *("jlade.conversion", "jlade.devices.mesh", "jlade.devices.sheet", "jlade.files", "jlade.models"),
        ),
    }
    for name, file in MODULES.items():
        for floor, accepted in below.items():
            if name.startswith(floor):
                others = {n for n in imported_by(name, file) if n in MODULES and not n.startswith(accepted)}
                assert not others, f"{name} imports {others}"


def test_modules_are_short_and_the_top_level_is_small():
    lengths = {name: len(file.read_text(encoding="utf-8").splitlines()) for name, file in MODULES.items()}
    assert max(lengths.values()) <= 400, max(lengths, key=lengths.get)
    top = {path.name for path in (ROOT / "jlade").iterdir() if path.suffix == ".py" or path.is_dir()} - {"__pycache__"}
    assert len(top - {"__main__.py"}) <= 16, sorted(top)
