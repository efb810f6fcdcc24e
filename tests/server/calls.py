"""A tool, its call and what it returns, in the form of /v1/responses."""

from tests.server.json_chat import SCHEMA

SHOP, BUY = ({"type": "function", "name": name, "parameters": SCHEMA} for name in ("shop", "buy"))
CALL = {"type": "function_call", "call_id": "c1", "name": "shop", "arguments": '{"size": "small"}'}
OUTPUT = {"type": "function_call_output", "call_id": "c1", "output": "done"}
