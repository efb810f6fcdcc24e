"""ROUGE by hand, and programs that pass, fail, or try to pass without running their tests."""

import json
import os
import pathlib
import sys
import time

import pytest

from jlade.evaluation import datasets, quality
from jlade.evaluation.datasets import CodeTests

DATA = pathlib.Path(__file__).parent / "data"
PROMPT = 'def double(x):\n    """Return twice x."""\n'
TESTS = CodeTests(PROMPT, "def check(candidate):\n    assert candidate(3) == 6\n\ncheck(double)\n")
RIGHT = "    return 2 * x\n"


def passes(completion, tests=TESTS, seconds=10.0):
    return quality.passed([completion], [tests], seconds) == (True,)


def test_rouge_by_hand():
    # The stems of the text are those of the reference but for one of four words, and "a b" is out of order.
    scores = quality.rouge(["the cats sat down"], ["The cat sat up"])
    assert scores == pytest.approx((75, 100 * 2 / 3, 75))
    scores = quality.rouge(["b a", "b a"], ["a b", "b a"])
    assert scores == pytest.approx((100, 50, 75))
    assert quality.rouge(["some words"], ["other things entirely"]) == (0, 0, 0)


def test_rouge_needs_its_package_and_pairs(monkeypatch):
    with pytest.raises(ValueError, match="texts and references must have the same length, at least 1, got 1 and 2"):
        quality.rouge(["a"], ["b", "c"])
    with pytest.raises(ValueError, match="at least 1, got 0 and 0"):
        quality.rouge([], [])
    monkeypatch.setitem(sys.modules, "rouge_score.rouge_scorer", None)
    with pytest.raises(ValueError, match=r'pip install "jlade\[evaluation\]"'):
        quality.rouge(["a"], ["b"])


ANSWER = "def double(x):\n    return 2 * x\n"


@pytest.mark.parametrize(
    "completion",
    [
        RIGHT,
        RIGHT + "\n\ndef triple(x):\n    return 3 *",
        RIGHT + "\nclass Half",
        RIGHT + '\nif __name__ == "__main__":\n    raise SystemExit',
        RIGHT + "\nprint(double('\n",
        RIGHT + "\n# The function `double` returns",
        RIGHT + "```\n\nThis function doubles a number.",
        "\n\n" + RIGHT,
        ANSWER,
        "import math\n\n\n" + ANSWER + "\nprint(double(2))\n",
        f"Here it is:\n\n```python\n{ANSWER}```\n\nIt multiplies by two.",
        f" Sure!\n```\n{ANSWER}",
        f"Add this line:\n```python\n{RIGHT}```",
        f"1. Write this:\n\n   ```python\n{ANSWER}   ```\n2. Run it.",
    ],
)
def test_right_completions_pass(completion):
    assert passes(completion)


@pytest.mark.parametrize(
    "completion",
    [
        "    return 3 * x",
        "    pass",
        "",
        "return 2 * x",
        "    return (2 * x",
        "    raise SystemExit(0)",
        "    import os\n    os._exit(0)",
        "def double(x):\n    return 2 * x\nimport sys\nsys.exit(0)",
        "import os\nprint('passed', flush=True)\nos._exit(0)",
        "import os\nfor i in range(3, 64):\n    try:\n        os.write(i, b'+\\n')\n    except OSError:\n        pass\n"
        + ANSWER,
        "import atexit\natexit.register(print, 'passed')\nraise SystemExit(0)",
        "    import os\n    os.fork()\n    return 2 * x",
        "    import os\n    os.system('true')\n    return 2 * x",
        "    import subprocess\n    subprocess.run(['true'])\n    return 2 * x",
        "    import os\n    os.posix_spawn('/bin/true', ['true'], {})\n    return 2 * x",
        "    import multiprocessing\n    multiprocessing.Process(target=print).start()\n    return 2 * x",
        "    import os\n    os.kill(os.getppid(), 0)\n    return 2 * x",
        "    bytearray(10 * 2**30)\n    return 2 * x",
        "    with open('huge', 'wb') as file:\n        while file.write(bytes(2**20)):\n            pass",
        "    files = [open('/dev/null') for _ in range(1000)]\n    return 2 * x",
        "    input()\n    return 2 * x",
        "    def deeper(n):\n        return deeper(n + 1)\n    return deeper(0)",
        "    import signal, os\n    signal.raise_signal(signal.SIGSEGV)\n    return 2 * x",
        "    \0",
        "    '\ud800'",
    ],
)
def test_wrong_completions_fail(completion):
    assert not passes(completion)


def test_a_loop_ends_after_its_time():
    start = time.monotonic()
    assert not passes("    while True:\n        pass", seconds=0.3)
    assert not passes("    import time\n    time.sleep(100)", seconds=0.3)
    assert not passes("    while True:\n        print('passed' * 1000)", seconds=0.3)
    assert time.monotonic() - start < 30


def test_the_code_runs_apart(tmp_path, monkeypatch):
    """In an empty directory, without the environment, the caller's modules and open files; output is harmless."""
    monkeypatch.setenv("SECRET", "1")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "secret.py").write_text("")
    assert passes(
        "    import os, sys\n"
        "    print('a' * 10**6)\n"
        "    assert os.listdir() == [] and 'SECRET' not in os.environ and 'jlade' not in sys.modules\n"
        "    assert '' not in sys.path and os.getcwd() not in sys.path\n"
        "    assert os.getsid(0) == os.getpid() and os.getsid(0) != os.getsid(os.getppid())\n"
        "    open('file', 'w').write('a')\n"
        "    return 2 * x"
    )
    assert os.listdir() == ["secret.py"]


def test_dataclasses_work():
    answer = (
        "from __future__ import annotations\nimport dataclasses\n\n@dataclasses.dataclass\nclass Pair:\n    a: int\n"
    )
    assert passes(answer, CodeTests("", "assert Pair(1).a == 1"))


@pytest.mark.parametrize(("name", "solution"), [("humaneval", "canonical_solution"), ("mbpp", "code")])
def test_data_sets_pass_with_their_solutions(name, solution):
    tests = [question.tests for question in datasets.read(DATA / f"{name}.jsonl").questions]
    lines = (DATA / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    solutions = [json.loads(line)[solution] for line in lines]
    assert quality.pass_rate(solutions, tests) == 100
    assert quality.passed(["    return None", *solutions[1:]], tests) == (False, True)


def test_pass_rate():
    assert quality.pass_rate([RIGHT, "    return x", RIGHT, RIGHT], [TESTS] * 4) == 75


def test_bad_arguments():
    with pytest.raises(ValueError, match="completions and tests must have the same length, at least 1, got 1 and 0"):
        quality.passed(["a"], [])
    with pytest.raises(ValueError, match="seconds must be positive and finite, got 0"):
        quality.passed(["a"], [TESTS], 0)
    with pytest.raises(ValueError, match="seconds must be positive and finite, got nan"):
        quality.pass_rate(["a"], [TESTS], float("nan"))


def test_only_on_linux(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(ValueError, match=r"runs on Linux only.*got darwin"):
        quality.passed([RIGHT], [TESTS])


def test_an_interpreter_that_does_not_start_is_no_failed_completion(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(RuntimeError, match="did not start: /bin/false -I"):
        quality.passed([RIGHT], [TESTS])


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("She has 4 + 3 = 7 pears.", "7"),
        ("It costs $1,234.50.", "1234.5"),
        ("So the answer is 20.00", "20"),
        ("from 5 to -3", "-3"),
        ("The answer is 100.", "100"),
        ("none", None),
    ],
)
def test_the_last_number_of_a_text(text, number):
    assert quality.last_number(text) == number
