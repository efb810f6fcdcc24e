"""Runs real clients against `jlade serve` and prints, for each, the features that worked.

    python tests/clients/run.py --model FILE [--into FOLDER] [--results FILE] [NAME ...]

The model may be small: a client's protocol is tried, not what the model says. Each client is installed in FOLDER, in
its pinned version, by uv or npm. A script prints a line of JSON for each feature; a program has one feature, its run.
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
from typing import Any, NamedTuple

HERE = pathlib.Path(__file__).resolve().parent
PORT = 8766
BASE = f"http://127.0.0.1:{PORT}"
SAY = "Answer with one word: hello."
PROVIDER = f'{{name="jlade",base_url="{BASE}/v1",wire_api="responses",env_key="OPENAI_API_KEY"}}'
CODEX = ["-c", "model_provider=jlade", "-c", f"model_providers.jlade={PROVIDER}"]
CODEX += ["-c", 'model_instructions_file="instructions.md"']  # its own and its tools are more than 8192 tokens
OPENCODE = {
    "npm": "@ai-sdk/openai-compatible",
    "options": {"baseURL": f"{BASE}/v1", "apiKey": "none"},
    "models": {"smollm2": {"limit": {"context": 8192, "output": 64}}},
}
ENVIRONMENT = {
    "OPENAI_BASE_URL": f"{BASE}/v1",
    "OPENAI_API_BASE": f"{BASE}/v1",  # litellm's name: dspy, aider
    "OPENAI_API_KEY": "none",
    "ANTHROPIC_BASE_URL": BASE,
    "ANTHROPIC_API_KEY": "none",
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    "CLAUDE_CODE_MAX_OUTPUT_TOKENS": "64",
    "OPENCODE_CONFIG_CONTENT": json.dumps({"provider": {"jlade": OPENCODE}, "autoupdate": False}),
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
}


class Client(NamedTuple):
    """A client, the packages that it needs, and the command that tries it: a script beside this file, or a program."""

    packages: tuple[str, ...]  # of npm if they start with "npm:", else of PyPI
    command: tuple[str, ...]


CLIENTS = {
    "openai": Client(("openai==3.57.0",), ("with_openai.py",)),
    "anthropic": Client(("anthropic==2.14.0", "pydantic"), ("with_anthropic.py",)),
    "openai-agents": Client(("openai-agents==0.24.0",), ("with_openai_agents.py",)),
    "pydantic-ai": Client(("pydantic-ai-slim[openai]==2.66.0",), ("with_pydantic_ai.py",)),
    "langchain": Client(("langchain==1.5.2", "langchain-openai==1.7.4"), ("with_langchain.py",)),
    "instructor": Client(("instructor==1.17.0",), ("with_instructor.py",)),
    "dspy": Client(("dspy==3.4.1",), ("with_dspy.py",)),
    "llm": Client(("llm==0.36",), ("with_llm.py",)),
    "smolagents": Client(("smolagents[openai]==1.26.0",), ("with_smolagents.py",)),
    "ai-sdk": Client(
        ("npm:ai@7.0.173", "npm:@ai-sdk/openai@4.0.118", "npm:@ai-sdk/openai-compatible@3.0.92", "npm:zod@4.6.7"),
        ("with_ai_sdk.mjs",),
    ),
    "aider": Client(
        ("aider-chat==0.86.2",),
        (
            *("aider", "--model", "openai/smollm2", "--no-git", "--yes-always", "--no-stream", "--no-check-update"),
            *("--analytics-disable", "--no-show-model-warnings", "--map-tokens", "0", "--message", "Add a comment."),
            "hello.py",
        ),
    ),
    "codex": Client(
        ("npm:@openai/codex@0.171.0",), ("codex", "exec", "--skip-git-repo-check", *CODEX, "-m", "smollm2", SAY)
    ),
    "opencode": Client(("npm:opencode-ai@1.18.33",), ("opencode", "run", "-m", "jlade/smollm2", SAY)),
    "claude-code": Client(
        ("npm:@anthropic-ai/claude-code@2.1.332",),
        ("claude", "-p", SAY, "--model", "smollm2", "--max-turns", "2", "--tools", "Read"),
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
    try:
        _wait(server)
        print("| client | version | works | fails |\n|---|---|---|---|", flush=True)
        for name in options.names:
            folder = options.into / name
            _install(CLIENTS[name], folder)
            features = _try(CLIENTS[name], folder, options.timeout)
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


def _try(client: Client, folder: pathlib.Path, timeout: float) -> dict[str, str]:
    """Returns the result of each feature, "ok" where it worked."""
    program, *arguments = client.command
    if program.endswith(".py"):
        command = [folder / "bin" / "python", HERE / program]
    elif program.endswith(".mjs"):  # it imports packages from the folder that holds it
        (folder / program).write_text((HERE / program).read_text())
        command = ["node", folder / program]
    else:
        commands = folder / ("node_modules/.bin" if client.packages[0].startswith("npm:") else "bin")
        command = [commands / program, *arguments]
    with tempfile.TemporaryDirectory() as work:
        pathlib.Path(work, "hello.py").write_text("print('hello')\n")
        pathlib.Path(work, "instructions.md").write_text("You are a coding agent. Be short.\n")
        environment = {"PATH": os.environ["PATH"], "HOME": work, **ENVIRONMENT}
        settings: dict[str, Any] = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True}
        try:
            run = subprocess.run(command, cwd=work, env=environment, timeout=timeout, **settings)
        except subprocess.TimeoutExpired:
            return {"run": f"failed: no end within {timeout:.0f} s"}
    lines = [json.loads(line) for line in run.stdout.splitlines() if line.startswith('{"feature"')]
    features = {line["feature"]: line["result"] for line in lines}
    if run.returncode or not features:
        features["run"] = _result(run)
    return features


def _result(run: subprocess.CompletedProcess[str]) -> str:
    """Returns "ok" if a program ended well and answered, else its line with an error."""
    lines = [line.strip() for line in f"{run.stderr}\n{run.stdout}".splitlines() if line.strip()]
    errors = [line for line in lines if re.search(r"Error:|ERROR:", line)]
    if run.returncode == 0 and run.stdout.strip() and not errors:
        return "ok"
    return f"failed: {[f'exit status {run.returncode}', *lines[-1:], *errors[:1]][-1]}"[:300]


if __name__ == "__main__":
    main()
