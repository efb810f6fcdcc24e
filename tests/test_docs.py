"""Every example of README.md and docs/ runs, and every name, path and link in them exists."""

import ast
import importlib
import importlib.util
import inspect
import io
import os
import re
import shlex
import sys
import tomllib

import jax
import pytest

from jlade import cli
from jlade.cli import commands, generate, inspection, serve
from jlade.cli.arguments import make_mesh
from jlade.conversion import location
from jlade.costs import estimate
from jlade.evaluation.experiments import EXPERIMENTS
from tests.conversion.adapter_files import shapes_of, write_adapter
from tests.conversion.gguf_files import write_chat
from tests.pages import PAGES, README, ROOT, read_blocks
from tests.tiny import PAPER

FLAGS_OF_OTHERS = {"--speculative-config", "--worker", "--xla_gpu_enable_triton_gemm"}  # alone in the text
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def inline_code(page):
    """Returns the code within the text; it may go on in the next line."""
    paragraphs = read_blocks(page)[1].split("\n\n")
    return [" ".join(code.split()) for text in paragraphs for code in re.findall(r"`([^`]+)`", text)]


@pytest.fixture
def workplace(tmp_path, monkeypatch, small_demo):
    """A directory with the files that the examples name."""
    monkeypatch.setattr("jlade.cli.arguments.DEMO", small_demo)
    monkeypatch.setattr(estimate, "SMALL_BLOCK", PAPER)  # which compiles soon
    monkeypatch.setattr(location, "installed", lambda name: None)  # `make chat` may have installed a model
    monkeypatch.setattr(jax.distributed, "initialize", lambda **_: None)  # one process runs the examples
    (tmp_path / "path" / "to").mkdir(parents=True)
    (tmp_path / "path" / "to" / "hf-llama").symlink_to(small_demo)
    write_adapter(tmp_path / "path" / "to" / "adapter", shapes_of(small_demo))
    write_chat(tmp_path / "path" / "to" / "model.gguf")
    (tmp_path / "prompts.txt").write_text("def f(\n\nThe library\n", encoding="utf-8")
    records = next(block.text for block in read_blocks(ROOT / "docs" / "usage.md")[0] if block.text.startswith("{"))
    (tmp_path / "records.jsonl").write_text(records, encoding="utf-8")
    (tmp_path / "notes.py").write_text("def read_config(path):\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.slow
@pytest.mark.usefixtures("workplace")
@each_page
def test_examples_run(page, monkeypatch, capsys):
    namespace = {"__name__": "__main__"}
    for block in read_blocks(page)[0]:
        if block.kind == "python":
            if "custom_generate" in block.text and importlib.util.find_spec("torch") is None:
                continue  # the test extra installs torch on Python 3.11 only
            exec(compile("\n" * block.line + block.text, page, "exec"), namespace)
        elif block.kind == "sh":
            for number, line in enumerate(block.text.splitlines(), start=block.line + 1):
                run_line(shlex.split(line, comments=True), f"{page.name}:{number}", monkeypatch, capsys)
        else:
            assert block.kind == "text", f"{page.name}:{block.line}: no test runs blocks of {block.kind!r}"


def run_line(words, place, monkeypatch, capsys):
    """Runs the line of a shell if it calls jlade, and else checks that it can run."""
    while words and re.match(r"[A-Z_]+=", words[0]):
        words = words[1:]
    match words:
        case []:
            pass
        case ["srun", "--nodes=2", "jlade", "generate", *arguments] | ["jlade", "generate", *arguments] if (
            "--distributed" in arguments  # one process of several
        ):
            make_mesh(generate.parser().parse_args(arguments))
        case ["echo", text, "|", "jlade", *arguments]:
            run_command(arguments, f"{text}\n", place, monkeypatch, capsys)
        case ["jlade", "serve", *arguments]:  # tests/server runs it
            serve.parser().parse_args(arguments)
        case ["jlade", "inspect", _, "--device", device, *_] if device != "cpu":  # its compiler may not be installed
            inspection.parser().parse_args(words[2:])
        case ["jlade", "compile", *_] if {"--device", "--engine"} & set(
            words
        ):  # tests/cli/test_compile.py runs engines
            commands.parse(words[1:])
        case ["jlade", *arguments]:
            run_command(arguments, "/help\n/exit\n" if arguments[0] == "chat" else "", place, monkeypatch, capsys)
        case ["make", target, *settings] if all(re.match(r"[A-Z]+=", setting) for setting in settings):
            assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE), place
        case ["pip", "install", "--no-deps", package]:
            assert f"--no-deps {package}" in (ROOT / "Makefile").read_text(encoding="utf-8"), place
        case ["pip", "install", package]:
            check_package(package, place)
        case [script] if script.startswith("benchmarks/"):
            assert os.access(ROOT / script, os.X_OK), place
        case ["python", "-m", module, *arguments] if module.startswith(("benchmarks.", "tests.stress.")):
            check_script(file_of(module, "__main__"), arguments, place)
        case ["python", script, *arguments]:
            check_script(script, arguments, place)
        case _:
            pytest.fail(f"{place}: no test knows how to run {shlex.join(words)!r}")


def run_command(arguments, typed, place, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
    capsys.readouterr()
    assert cli.main(arguments) == 0, place
    assert any(capsys.readouterr()), f"{place}: no output"


def check_package(package, place):
    extras = re.fullmatch(r"\.(?:\[([\w,-]+)\])?", package)
    assert extras is not None, f"{place}: {package} is not this package"
    unknown = [extra for extra in (extras[1] or "").split(",") if extra and extra not in EXTRAS]
    assert not unknown, f"{place}: there is no extra {unknown[0]!r}"


def check_script(script, arguments, place):
    """Checks that a script exists and has the options: running it takes minutes."""
    assert (ROOT / script).is_file(), f"{place}: there is no {script}"
    unknown = {word for word in arguments if word.startswith("--")} - flags_of(ROOT / script)
    assert not unknown, f"{place}: {script} has no option {', '.join(unknown)}"


def flags_of(script):
    """Returns the options that a script adds to its parser, itself or in the benchmarks that it imports from."""
    options = set()
    for node in ast.walk(ast.parse(script.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if node.func.attr == "add_argument":
                options |= {ast.literal_eval(argument) for argument in node.args}
        elif isinstance(node, ast.ImportFrom) and node.module == "benchmarks":
            options |= set().union(*(flags_of(ROOT / "benchmarks" / f"{name.name}.py") for name in node.names))
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("benchmarks."):
            options |= flags_of(ROOT / file_of(node.module, "__init__"))
    return options


def file_of(module, name):
    """Returns the path of a module, of a package the file of this name."""
    path = module.replace(".", "/")
    return f"{path}/{name}.py" if (ROOT / path).is_dir() else f"{path}.py"


@each_page
def test_names_exist(page):
    names = [match[0] for code in inline_code(page) if (match := re.match(r"jlade(\.[a-zA-Z_]\w*)+", code))]
    for name in names:
        thing, parts = importlib.import_module("jlade"), name.split(".")[1:]
        for i, part in enumerate(parts):
            if not hasattr(thing, part):
                importlib.import_module(".".join(["jlade", *parts[: i + 1]]))
            thing = getattr(thing, part)


@each_page
def test_paths_exist(page):
    folders = ("benchmarks", "conversion", "docs", "examples", "jlade", "tests")
    paths = [code for code in inline_code(page) if re.fullmatch(rf"({'|'.join(folders)})/\S*", code)]
    assert [path for path in paths if not (ROOT / path).exists()] == []


@each_page
def test_lines_within_the_text_can_run(page):
    for code in inline_code(page):
        words = shlex.split(code) if code.startswith(("python ", "pip ", "make ")) else []
        if words:
            run_line(words, f"{page.name}: {code}", None, None)


@pytest.mark.parametrize("page", [*PAGES, ROOT / "SECURITY.md"], ids=lambda page: page.name)
def test_commands_and_options_within_the_text_exist(page):
    flags = {name: options_of(command) for name, command in commands.COMMANDS.items()} | {"help": set()}
    any_command = set().union(*flags.values())
    for code in inline_code(page):
        used = set(re.findall(r"(?<!\S)--[a-z][\w-]*", code))
        if code.startswith("--"):
            assert used <= any_command | FLAGS_OF_OTHERS, code
        elif code.startswith("jlade "):
            name = code.split()[1]
            assert name in flags or name.isupper() or used == {"--version"}, code
            assert used <= flags.get(name, flags["complete"] | {"--version"}), code


def options_of(command):
    return {flag for action in command.parser()._actions for flag in action.option_strings}


@each_page
def test_links_lead_to_files_and_headings(page):
    links = re.findall(r"\]\(([^)\s]+)\)", read_blocks(page)[1])
    for link in links:
        if link.startswith("https://"):
            continue
        path, _, heading = link.partition("#")
        target = page.parent / path if path else page
        assert target.is_file(), f"{page.name}: {link}"
        assert not heading or heading in headings(target), f"{page.name}: {link}"


def test_the_map_of_the_paper_is_whole_and_its_names_exist():
    """Every algorithm, equation, table, figure and appendix of the paper has a row, with files, names and commands."""
    page = (ROOT / "docs" / "how_it_works.md").read_text(encoding="utf-8")
    rows = [
        line.split("|")[1:4] for line in page.partition("## The paper in the code")[2].splitlines() if line[:1] == "|"
    ]
    places = " ".join(place for place, _, _ in rows)
    parts = {"Algorithm": "1234", "Equation": "123456789", "Table": "1234", "Figure": "12345678", "Appendix": "ABCDE"}
    for kind, numbers in parts.items():
        named = re.findall(rf"{kind}s? ((?:\w\b(?:, | and )?)+)", places)
        assert set(re.findall(r"\b\w\b", " ".join(named))) == set(numbers), kind
    for _, idea, here in rows[2:]:
        spans = re.findall(r"`([^`]+)`", here)
        files = [ROOT / span for span in spans if "/" in span]
        commands = [span.split()[2] for span in spans if span.startswith("jlade bench ")]
        names = [span for span in spans if "/" not in span and not span.startswith("jlade ")]
        assert files or commands, idea
        assert all(file.is_file() for file in files), idea
        assert set(commands) <= EXPERIMENTS.keys(), idea
        text = "\n".join(file.read_text(encoding="utf-8") for file in files)
        for name in names:
            assert re.search(rf"^ *(def|class) {name}\b|^ *{name}(:.*)? =", text, re.MULTILINE), name


def headings(page):
    """Returns the anchors that GitHub makes of a page's headings."""
    titles = re.findall(r"^#+ (.*)$", read_blocks(page)[1], re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_the_reference_has_every_public_name():
    text = (ROOT / "docs" / "api.rst").read_text(encoding="utf-8")
    listed = re.findall(r"^\.\. auto\w+:: (.*)$", text, re.MULTILINE)
    jlade = importlib.import_module("jlade")
    public = {name for name in jlade.__all__ if not inspect.ismodule(getattr(jlade, name))}
    others = {"jlade.testing.check_constraint", "jlade.testing.check_decoder"}
    on_ray = {"data.Completer", "data.parts", "serve.Replica", "serve.application"}
    assert sorted(listed) == sorted(public | others | {f"jlade.integrations.ray.{name}" for name in on_ray})


def test_the_readme_is_short_and_links_every_page():
    text = README.read_text(encoding="utf-8")
    assert len([line for line in text.splitlines() if not line.startswith("<!--")]) <= 150
    assert [page.name for page in PAGES[1:] if f"](docs/{page.name})" not in text] == []


def test_the_readme_can_be_pasted():
    assert [block for block in read_blocks(README)[0] if block.kind == "python" and "path/to" in block.text] == []


def test_every_benchmark_is_listed():
    text = (ROOT / "docs" / "speed.md").read_text(encoding="utf-8")
    scripts = {script.name for script in (ROOT / "benchmarks").glob("*.py")}
    assert {name for name in scripts if name not in text} == set()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("curl https://example.org", "knows how to run"),
        ("pip install '.[nothing]'", "no extra"),
        ("python benchmarks/nothing.py", "there is no"),
        ("python benchmarks/loading.py --nothing", "no option --nothing"),
        ("python -m tests.stress.nothing", "there is no"),
        ("python -m tests.stress.soak --nothing", "no option --nothing"),
        ("make nothing", "page:1"),
    ],
)
def test_a_line_that_cannot_run_is_found(line, message):
    with pytest.raises((AssertionError, pytest.fail.Exception), match=message):
        run_line(shlex.split(line), "page:1", None, None)
