"""Test suites of other projects against `jlade serve`.

    python -m tests.stress.peers llama.cpp path/to/llama.cpp/tools/server/tests --python path/to/python
    python -m tests.stress.peers openai-python path/to/openai-python --python path/to/python

It starts a server of the demo model, copies the tests to a temporary folder, replaces names of models and other values
of their own server there, and runs them by a Python that has their requirements. tests/server/README.md says how to get
the tests, and why some fail. With --as-is nothing is replaced.
"""

import collections
import json
import os
import pathlib
import re
import shutil
import subprocess
import tempfile
import time
import urllib.parse
from typing import Any, NamedTuple
from xml.etree import ElementTree

import httpx

from benchmarks import measure, report
from tests.server import json_chat

MAX_SECONDS = 400  # for a test
CAPACITY = 512
END = "</s>"  # of the demo model's texts


class Suite(NamedTuple):
    """Tests of another project."""

    model: str  # the server's name of its model, so that fewer names are replaced
    files: tuple[str, ...]  # that are run
    replaced: dict[str, str]  # patterns, and what stands for them, in each Python file of `tests`
    environment: dict[str, str]  # of the tests; {port} and {url} are those of the server
    tests: str = "."  # the folder of the tests in that of the suite
    key: str = ""  # of the server; empty for one without keys


def _model(name: str) -> dict[str, str]:
    """Returns the replacement of the names of models, of which a server has one alone."""
    return {r"""\bmodel=["'][^"']+["']""": f'model="{name}"'}


_LLAMA = Suite(
    "tinyllama-2",
    tuple(f"unit/test_{name}.py" for name in ("basic", "chat_completion", "completion", "tokenize")),
    _model("tinyllama-2")
    | {
        r'"/(chat/completions|completions|models)': r'"/v1/\1',
        r'(base_url=f"http://\{server\.server_host\}:\{server\.server_port\})"': r'\1/v1"',
        # Texts, numbers of tokens and the fingerprint are those of its own model.
        r'match_regex\((re_content|"[^"]*"), ': 'match_regex("", ',
        r"== n_prompt\b": "> 0",
        r'startswith\("b"\)': 'startswith("jlade-")',
        # llama.cpp begins a stream with null, OpenAI with an empty text.
        r'(choice\.delta\.content|\["delta"\]\["content"\]) is None': r'\1 in (None, "")',
    },
    {"DEBUG_EXTERNAL": "1", "PORT": "{port}"},
)
SUITES = {
    "llama.cpp": _LLAMA,
    "llama.cpp-keys": _LLAMA._replace(files=("unit/test_security.py",), key="sk-this-is-the-secret-key"),
    "openai-python": Suite(
        "gpt-6-astra",
        ("api_resources/test_completions.py", "api_resources/chat/test_completions.py", "api_resources/test_models.py"),
        _model("gpt-6-astra"),
        {"TEST_API_BASE_URL": "{url}/v1"},
        "tests",
    ),
}


def main() -> None:
    parser = report.make_parser(__doc__)
    parser.add_argument("suite", choices=SUITES)
    parser.add_argument("folder", type=pathlib.Path, help="that has the suite")
    parser.add_argument("--python", required=True, help="has pytest and the requirements of the suite")
    parser.add_argument("--as-is", action="store_true", help="replace nothing in the tests")
    parser.add_argument("-k", default="", metavar="NAMES", help="tests to run, as for pytest")
    options = parser.parse_args()
    suite = SUITES[options.suite]
    with tempfile.TemporaryDirectory() as temporary:
        folder = pathlib.Path(temporary)
        shutil.copytree(options.folder, folder / "suite")
        for file in [] if options.as_is else (folder / "suite" / suite.tests).rglob("test_*.py"):
            file.write_text(replace(file.read_text(encoding="utf-8"), suite.replaced), encoding="utf-8")
        with measure.served("demo", *serve_options(suite, folder)) as (_, url):
            while httpx.get(f"{url}/health").status_code != 200:
                time.sleep(1)
            run(suite, folder, options.python, options.k, url)
        figures = outcomes(folder / "junit.xml")
    print(json.dumps(figures, indent=1))
    arguments = {"suite": options.suite, "replaced": {} if options.as_is else suite.replaced}
    report.write(options.json, arguments | figures)


def replace(text: str, replaced: dict[str, str]) -> str:
    for pattern, by in replaced.items():
        text = re.sub(pattern, by, text)
    return text


def serve_options(suite: Suite, folder: pathlib.Path) -> list[str]:
    """Returns the options of a server with a template that shows tools, whose files it writes."""
    template, keys = folder / "template.jinja", folder / "keys"
    template.write_text(json_chat.HERMES.replace(json_chat.END, END), encoding="utf-8")
    keys.write_text(suite.key, encoding="ascii")
    options = ["--name", suite.model, "--template", str(template), "--capacity", str(CAPACITY), "--max-sequences", "2"]
    return [*options, *(["--api-key-file", str(keys)] if suite.key else [])]


def run(suite: Suite, folder: pathlib.Path, python: str, names: str, url: str) -> None:
    """Runs the tests, and leaves their outcomes in junit.xml."""
    port = str(urllib.parse.urlsplit(url).port)
    environment = {name: value.format(port=port, url=url) for name, value in suite.environment.items()}
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [python, "-m", "pytest", *suite.files, "-o", "addopts=", "-k", names, f"--timeout={MAX_SECONDS}"]
    command += ["--tb=line", f"--junitxml={folder / 'junit.xml'}"]
    ended = subprocess.run(command, cwd=folder / "suite" / suite.tests, env=inherited | environment, check=False)
    assert ended.returncode in (0, 1), f"pytest ended with {ended.returncode}"


def outcomes(junit: pathlib.Path) -> dict[str, Any]:
    """Returns how many tests of each module passed, failed and were skipped, and the errors of those that failed."""
    counts: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    errors: dict[str, str] = {}
    for case in ElementTree.parse(junit).iter("testcase"):
        module = case.attrib["classname"].split(".Test")[0]
        fault = next((each for each in case if each.tag in ("failure", "error")), None)
        outcome = "skipped" if case.find("skipped") is not None else "passed" if fault is None else "failed"
        counts[module][outcome] += 1
        if fault is not None:
            message, _, _ = fault.attrib["message"].partition("\n")
            errors[f"{case.attrib['classname']}::{case.attrib['name']}"] = message[:300]
    return {"outcomes": counts, "errors": errors}


if __name__ == "__main__":
    main()
