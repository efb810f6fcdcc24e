"""Runs real clients against `jlade serve` and prints, for each, the features that worked.

    python tests/clients/run.py --model FILE [--into FOLDER] [--results FILE] [NAME ...]

The model may be small: a client's protocol is tried, not what the model says. Each client is installed in FOLDER, in
its pinned version, by uv or npm. A script prints a line of JSON for each feature. A program has turns, each a command,
in which a proxy makes the model call harmless tools.
"""

import argparse
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from typing import Any, NamedTuple

from proxy import Proxy

HERE = pathlib.Path(__file__).resolve().parent
PORT = 8766
BASE = f"http://127.0.0.1:{PORT}"
PROXY_PORT = 8767
PROXY = f"http://127.0.0.1:{PROXY_PORT}"
SAY = "Answer with one word: hello."
AGAIN = "And another word."
REPORT = "Report a city and its degrees as JSON."
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}, "degrees": {"type": "integer"}},
    "required": ["city", "degrees"],
    "additionalProperties": False,
}
INSTRUCTIONS = "You are a coding agent. Be short."
PROVIDER = f'{{name="jlade",base_url="{PROXY}/v1",wire_api="responses",env_key="OPENAI_API_KEY"}}'
CODEX = (
    "--skip-git-repo-check",
    "-m",
    "smollm2",
    "-c",
    'sandbox_mode="read-only"',
    "-c",
    "tools.update_plan.enabled=true",
)
CODEX += ("-c", "model_provider=jlade", "-c", f"model_providers.jlade={PROVIDER}")
CODEX += ("-c", 'model_instructions_file="instructions.md"')  # its own and its tools are more than 8192 tokens
IN_SCHEMA = ("--output-schema", "schema.json")  # which bounds the answers of a model that does not end them
OPENCODE = {
    "autoupdate": False,
    "permission": {"*": "deny", "todowrite": "allow", "glob": "allow"},
    "provider": {
        "jlade": {
            "npm": "@ai-sdk/openai-compatible",
            "options": {"baseURL": f"{PROXY}/v1", "apiKey": "none"},
            "models": {"smollm2": {"limit": {"context": 8192, "output": 256}}},
        }
    },
}
CLAUDE = ("--model", "smollm2", "--max-turns", "4", "--tools", "Read,Glob", "--system-prompt", INSTRUCTIONS)
ENVIRONMENT = {
    "OPENAI_BASE_URL": f"{BASE}/v1",
    "OPENAI_API_BASE": f"{BASE}/v1",  # litellm's name: dspy, aider
    "OPENAI_API_KEY": "none",
    "ANTHROPIC_BASE_URL": BASE,
    "ANTHROPIC_API_KEY": "none",
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    "CLAUDE_CODE_MAX_OUTPUT_TOKENS": "512",
    "OPENCODE_CONFIG_CONTENT": json.dumps(OPENCODE),
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
}


class Turn(NamedTuple):
    """A turn of a program's conversation."""

    name: str
    arguments: tuple[str, ...]
    tools: tuple[str, ...] = ()  # what the model has to call, in this order, before it answers
    shows: str = "."  # a pattern in what the program prints
    ends_with_call: bool = False  # of which the program sends no result


class Client(NamedTuple):
    """A client, the packages that it needs, and what tries it: a script beside this file, or a program in turns."""

    packages: tuple[str, ...]  # of npm if they start with "npm:", else of PyPI
    program: str
    turns: tuple[Turn, ...] = ()


CLIENTS = {
    "openai": Client(("openai==3.57.0",), "with_openai.py"),
    "anthropic": Client(("anthropic==2.14.0", "pydantic"), "with_anthropic.py"),
    "openai-agents": Client(("openai-agents==0.24.0",), "with_openai_agents.py"),
    "pydantic-ai": Client(("pydantic-ai-slim[openai]==2.66.0",), "with_pydantic_ai.py"),
    "langchain": Client(("langchain==1.5.2", "langchain-openai==1.7.4"), "with_langchain.py"),
    "instructor": Client(("instructor==1.17.0",), "with_instructor.py"),
    "dspy": Client(("dspy==3.4.1",), "with_dspy.py"),
    "llm": Client(("llm==0.36",), "with_llm.py"),
    "smolagents": Client(("smolagents[openai]==1.26.0",), "with_smolagents.py"),
    "ai-sdk": Client(
        ("npm:ai@7.0.173", "npm:@ai-sdk/openai@4.0.118", "npm:@ai-sdk/openai-compatible@3.0.92", "npm:zod@4.6.7"),
        "with_ai_sdk.mjs",
    ),
    "aider": Client(("aider-chat==0.86.2",), "with_aider.py"),
    "codex": Client(
        ("npm:@openai/codex@0.171.0",),
        "codex",
        (
            Turn("first turn", ("exec", *CODEX, *IN_SCHEMA, SAY), ("update_plan", "get_goal")),
            Turn("second turn", ("exec", "resume", "--last", *CODEX, *IN_SCHEMA, AGAIN), ("get_goal",)),
            Turn(
                "final structure",
                ("exec", "resume", "--last", *CODEX, *IN_SCHEMA, REPORT),
                ("get_goal",),
                shows=r'\{\s*"city":',
            ),
        ),
    ),
    "opencode": Client(
        ("npm:opencode-ai@1.18.33",),
        "opencode",
        (
            Turn("first turn", ("run", "-m", "jlade/smollm2", SAY), ("todowrite", "glob")),
            Turn("second turn", ("run", "-m", "jlade/smollm2", "--continue", AGAIN), ("glob",)),
            Turn("third turn", ("run", "-m", "jlade/smollm2", "--continue", REPORT)),
        ),
    ),
    "claude-code": Client(
        ("npm:@anthropic-ai/claude-code@2.1.332",),
        "claude",
        (
            Turn("first turn", (*CLAUDE, "-p", SAY), ("Read", "Glob")),
            Turn("second turn", (*CLAUDE, "--continue", "-p", AGAIN), ("Glob",)),
            Turn(
                "final structure",
                (*CLAUDE, "--continue", "-p", REPORT, "--output-format", "json", "--json-schema", json.dumps(SCHEMA)),
                ("StructuredOutput",),  # its own, whose arguments are the answer
                shows=r'\{\s*"city":',
                ends_with_call=True,
            ),
        ),
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a checkpoint or GGUF file of at least 8192 positions in ChatML")
    parser.add_argument("--into", type=pathlib.Path, default=pathlib.Path(tempfile.gettempdir(), "jlade-clients"))
    parser.add_argument("--results", type=pathlib.Path, default=HERE / "results.json", metavar="FILE")
    parser.add_argument("--timeout", type=float, default=600.0, metavar="S", help="for each client (default: 600)")
    parser.add_argument("names", nargs="*", default=list(CLIENTS), metavar="NAME")
    options = parser.parse_args()

    results = json.loads(options.results.read_text()) if options.results.exists() else {}
    arguments = ["--template", HERE / "chatml_tools.jinja", "--name", "smollm2", "--port", PORT, "--capacity", 8192]
    serve = [sys.executable, "-m", "jlade", "serve", options.model, *map(str, arguments), "--max-sequences", "2"]
    server = subprocess.Popen(serve, cwd=HERE.parent.parent, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    proxy = Proxy(PROXY_PORT, PORT)
    try:
        _wait(server)
        print("| client | version | works | fails |\n|---|---|---|---|", flush=True)
        for name in options.names:
            folder = options.into / name
            _install(CLIENTS[name], folder)
            features = _try(CLIENTS[name], folder, proxy, options.timeout)
            results[name] = {"packages": CLIENTS[name].packages, "features": features}
            options.results.write_text(json.dumps(results, indent=1) + "\n")
            works = [feature for feature, result in features.items() if result.startswith("ok")]
            fails = [f"{feature} ({result})" for feature, result in features.items() if feature not in works]
            cells = name, CLIENTS[name].packages[0].split("@")[-1].split("=")[-1], ", ".join(works), "; ".join(fails)
            print("|", " | ".join(cell.replace("|", " ") for cell in cells), "|", flush=True)
    finally:
        server.terminate()
        server.wait()


def _wait(server: subprocess.Popen[bytes]) -> None:
    """Waits until the server answers, or raises if it ends."""
    while server.poll() is None:
        try:
            urllib.request.urlopen(f"{BASE}/v1/models")
            return
        except urllib.error.URLError:
            time.sleep(1)
    raise RuntimeError("the server ended before it answered")


def _install(client: Client, folder: pathlib.Path) -> None:
    if folder.exists():
        return
    packages = [package.removeprefix("npm:") for package in client.packages]
    if client.packages[0].startswith("npm:"):
        subprocess.run(["npm", "install", "--silent", "--no-audit", "--prefix", folder, *packages], check=True)
    else:
        python = folder / "bin" / "python"
        subprocess.run(["uv", "venv", "--quiet", folder], check=True)
        subprocess.run(["uv", "pip", "install", "--quiet", "--python", python, *packages], check=True)


def _try(client: Client, folder: pathlib.Path, proxy: Proxy, timeout: float) -> dict[str, str]:
    """Returns the result of each feature, "ok" where it worked."""
    if client.program.endswith(".py"):
        command: list[str | pathlib.Path] = [folder / "bin" / "python", HERE / client.program]
    elif client.program.endswith(".mjs"):  # it imports packages from the folder that holds it
        (folder / client.program).write_text((HERE / client.program).read_text())
        command = ["node", folder / client.program]
    else:
        command = [folder / "node_modules" / ".bin" / client.program]
    features = {}
    with tempfile.TemporaryDirectory() as work:
        pathlib.Path(work, "hello.py").write_text("print('hello')\n")
        pathlib.Path(work, "instructions.md").write_text(INSTRUCTIONS)
        pathlib.Path(work, "schema.json").write_text(json.dumps(SCHEMA))
        environment = {"PATH": os.environ["PATH"], "HOME": work, **ENVIRONMENT}
        if not client.turns:
            run = _run(command, work, environment, timeout)
            lines = [json.loads(line) for line in run.stdout.splitlines() if line.startswith('{"feature"')]
            features = {line["feature"]: line["result"] for line in lines}
            if run.returncode or not features:
                features["run"] = _result(run)
        environment["ANTHROPIC_BASE_URL"] = PROXY
        for turn in client.turns:
            proxy.begin(turn.tools, turn.ends_with_call)
            run = _run([*command, *turn.arguments], work, environment, timeout)
            features[turn.name] = _result(run, turn.shows)
            features |= {f"{turn.name}: {feature}": result for feature, result in proxy.features().items()}
    return features


def _run(
    command: Sequence[str | pathlib.Path], work: str, environment: dict[str, str], timeout: float
) -> subprocess.CompletedProcess[str]:
    settings: dict[str, Any] = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True}
    try:
        return subprocess.run(command, cwd=work, env=environment, timeout=timeout, **settings)
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 1, "", f"no end within {timeout:.0f} s")


def _result(run: subprocess.CompletedProcess[str], shows: str = ".") -> str:
    """Returns "ok" if a program ended well and printed what matches a pattern, else its line with an error."""
    if run.returncode == 0 and re.search(shows, run.stdout):
        return "ok"
    lines = [line.strip() for line in f"{run.stderr}\n{run.stdout}".splitlines() if line.strip()]
    errors = [line for line in lines if re.search(r"Error:|ERROR:", line)]
    return f"failed: {[f'exit status {run.returncode}', *lines[-1:], *errors[:1]][-1]}"[:300]


if __name__ == "__main__":
    main()
