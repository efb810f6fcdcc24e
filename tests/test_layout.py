"""The layout of the package: no circle of imports, few names at the top."""

import ast
import graphlib
import pathlib
import re

ROOT = pathlib.Path(__file__).parents[1]
FILES = sorted((ROOT / "jlade").rglob("*.py"))
MODULES = {".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): file for file in FILES}
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
    assert graph["jlade.decoding.step"] > {"jlade.lookahead.window", "jlade.models.base"}, "the search finds imports"
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


# From the ground up. A package imports those of lower floors, never one of its own floor or of a higher one.
FLOORS = [
    {"errors", "files", "pictures"},
    {"mesh"},
    {"vocabulary"},
    {"drafts"},
    {"config"},
    {"constraints", "lookahead", "models"},
    {"conversion", "decoding", "testing"},
    {"costs", "demo"},
    {"generation"},
    {"engine", "storage"},
    {"inspection", "server"},
    {"integrations"},
    {"evaluation"},
    {"cli"},
    {"__main__"},
]


def package(name):
    """Returns the name of a module's package within jlade, or of the module itself; "" for jlade."""
    return f"{name}.".split(".")[1]


def test_no_import_climbs():
    floor_of = {name: floor for floor, names in enumerate(FLOORS) for name in names}
    climbing = [
        f"{name} imports {other}"
        for name, file in MODULES.items()
        for other in imported_by(name, file)
        if package(name) and package(other) in floor_of and package(other) != package(name)
        if floor_of[package(name)] <= floor_of[package(other)]
    ]
    assert not climbing, climbing
    assert {package(name) for name in MODULES} - {""} <= set(floor_of), "a package without a floor"


def test_the_top_level_is_small():
    top = {path.name for path in (ROOT / "jlade").iterdir() if path.suffix == ".py" or path.is_dir()} - {"__pycache__"}
    assert len(top - {"__main__.py"}) <= 24, sorted(top)


def test_what_tests_share_is_in_modules_of_its_own():
    imports = re.compile(r"^from tests\.(\w+\.)*test_", re.MULTILINE)
    for file in (ROOT / "tests").rglob("*.py"):
        code = re.sub(r'""".*?"""', "", file.read_text(encoding="utf-8"), flags=re.DOTALL)
        assert not imports.search(code), file  # but for programs of fresh processes, which are strings
