"""Tools of ordinary MCP servers, as agents send them: installs the servers, asks each for its tools, prints a table.

    python tests/clients/mcp_tools.py --into FOLDER [NAME ...]

It needs npm, uv and a network with package registries. The credentials are dummies, and no tool is called. Each server
leaves FOLDER/tools/NAME.json: `{"package", "version", "tools": [{"name", "description", "inputSchema"}]}`.
"""

import argparse
import json
import os
import pathlib
import subprocess
import threading
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

KEY = "x" * 40
SECONDS = 120  # for a server to start and answer


class Server(NamedTuple):
    """An MCP server on standard input and output."""

    package: str  # of npm if it starts with "npm:", else of PyPI
    version: str
    command: str  # its name in the package's folder of commands, and its arguments
    environment: Mapping[str, str] = MappingProxyType({})


SERVERS = {
    "github": Server("npm:@modelcontextprotocol/server-github", "2025.4.8", "mcp-server-github"),
    "playwright": Server("npm:@playwright/mcp", "0.0.83", "playwright-mcp"),
    "everything": Server("npm:@modelcontextprotocol/server-everything", "2026.8.31", "mcp-server-everything stdio"),
    "blender": Server("blender-mcp", "2.0.0", "blender-mcp", {"DISABLE_TELEMETRY": "true"}),
    "desktop-commander": Server("npm:@wonderwhy-er/desktop-commander", "0.2.52", "desktop-commander --no-onboarding"),
    "chrome-devtools": Server("npm:chrome-devtools-mcp", "1.11.0", "chrome-devtools-mcp --no-usage-statistics"),
    "kubernetes": Server("npm:mcp-server-kubernetes", "4.1.7", "mcp-server-kubernetes"),
    "arxiv": Server("arxiv-mcp-server", "0.8.2", "arxiv-mcp-server"),
    "atlassian": Server(
        "mcp-atlassian",
        "0.23.1",
        "mcp-atlassian",
        {
            **dict.fromkeys(("JIRA_API_TOKEN", "CONFLUENCE_API_TOKEN"), KEY),
            **dict.fromkeys(("JIRA_USERNAME", "CONFLUENCE_USERNAME"), "a@example.com"),
            "JIRA_URL": "https://example.atlassian.net",
            "CONFLUENCE_URL": "https://example.atlassian.net/wiki",
        },
    ),
    "firecrawl": Server("npm:firecrawl-mcp", "3.22.2", "firecrawl-mcp", {"FIRECRAWL_API_KEY": f"fc-{KEY}"}),
    "notion": Server("npm:@notionhq/notion-mcp-server", "2.5.2", "notion-mcp-server", {"NOTION_TOKEN": f"ntn_{KEY}"}),
    "filesystem": Server("npm:@modelcontextprotocol/server-filesystem", "2026.8.31", "mcp-server-filesystem ."),
    "memory": Server("npm:@modelcontextprotocol/server-memory", "2026.8.31", "mcp-server-memory"),
    "sequential-thinking": Server(
        "npm:@modelcontextprotocol/server-sequential-thinking", "2026.8.31", "mcp-server-sequential-thinking"
    ),
    "context7": Server("npm:@upstash/context7-mcp", "4.1.1", "context7-mcp"),
    "brave-search": Server(
        "npm:@brave/brave-search-mcp-server", "2.1.4", "brave-search-mcp-server", {"BRAVE_API_KEY": KEY}
    ),
    "tavily": Server("npm:tavily-mcp", "0.2.22", "tavily-mcp", {"TAVILY_API_KEY": f"tvly-{KEY}"}),
    "fetch": Server("mcp-server-fetch", "2026.10.24", "mcp-server-fetch"),
    "git": Server("mcp-server-git", "2026.10.19", "mcp-server-git"),
    "time": Server("mcp-server-time", "2026.10.19", "mcp-server-time --local-timezone UTC"),
    "mongodb": Server("npm:mongodb-mcp-server", "3.0.4", "mongodb-mcp-server --telemetry disabled"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--into", type=pathlib.Path, required=True, metavar="FOLDER")
    parser.add_argument("names", nargs="*", default=list(SERVERS), metavar="NAME")
    options = parser.parse_args()

    (options.into / "tools").mkdir(parents=True, exist_ok=True)
    print("| server | version | tools | bytes |\n|---|---|---|---|")
    for name in options.names:
        server = SERVERS[name]
        tools = _tools(server, _install(server, options.into / name))
        described = {"package": server.package.removeprefix("npm:"), "version": server.version, "tools": tools}
        (options.into / "tools" / f"{name}.json").write_text(json.dumps(described, indent=1))
        print(f"| {name} | {server.version} | {len(tools)} | {len(json.dumps(tools))} |", flush=True)


def _install(server: Server, folder: pathlib.Path) -> pathlib.Path:
    """Returns the folder of the package's commands, which is made if it is not there."""
    if server.package.startswith("npm:"):
        commands = folder / "node_modules" / ".bin"
        package = f"{server.package.removeprefix('npm:')}@{server.version}"
        install = [["npm", "install", "--silent", "--ignore-scripts", "--no-audit", "--prefix", str(folder), package]]
    else:
        commands = folder / "bin"
        package = f"{server.package}=={server.version}"
        install = [
            ["uv", "venv", "--quiet", str(folder)],
            ["uv", "pip", "install", "--quiet", "--python", str(folder / "bin" / "python"), package],
        ]
    if not commands.exists():
        for command in install:
            subprocess.run(command, check=True)
    return commands


def _tools(server: Server, commands: pathlib.Path) -> list[dict[str, Any]]:
    """Starts the server and returns its list of tools. Raises if the server ends or stays silent."""
    name, *arguments = server.command.split()
    process = subprocess.Popen(
        [commands.resolve() / name, *arguments],
        cwd=commands.parent,
        env={"PATH": os.environ["PATH"], "HOME": str(commands.parent.resolve()), **server.environment},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    timer = threading.Timer(SECONDS, process.kill)
    timer.start()
    try:
        client = {"name": "jlade", "version": "1"}
        asked = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": client}
        _ask(process, 1, "initialize", asked)
        _send(process, {"method": "notifications/initialized"})
        tools: list[dict[str, Any]] = []
        page: dict[str, Any] = {}
        while True:
            result = _ask(process, 2, "tools/list", page)
            tools += [
                {key: tool.get(key) for key in ("name", "description", "inputSchema")} for tool in result["tools"]
            ]
            if not result.get("nextCursor"):
                return tools
            page = {"cursor": result["nextCursor"]}
    finally:
        timer.cancel()
        process.kill()
        process.wait()


def _ask(process: subprocess.Popen[str], number: int, method: str, params: dict[str, Any]) -> Any:
    """Returns the result of a request, past notifications and lines of logs."""
    _send(process, {"id": number, "method": method, "params": params})
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("{"):
            message = json.loads(line)
            if message.get("id") == number and "method" not in message:
                return message["result"]
    raise RuntimeError(f"the server ended before it answered {method}")


def _send(process: subprocess.Popen[str], message: dict[str, Any]) -> None:
    assert process.stdin is not None
    process.stdin.write(json.dumps({"jsonrpc": "2.0", **message}) + "\n")
    process.stdin.flush()


if __name__ == "__main__":
    main()
