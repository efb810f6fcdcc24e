#!/usr/bin/env bash
# Guess: the bounds of a pydantic model reach the service when Anthropic's client asks for an answer of that type.
# Seen: anthropic 2.14.0 takes minimum, maximum, minLength and maxLength out of the schema that it sends and writes them
# into the description; it then checks the answer against them. So an answer that follows the schema is an error.
set -euo pipefail
folder=$(mktemp -d) && trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet anthropic==2.14.0 pydantic==2.14.4
"$folder/venv/bin/python" - <<'PYTHON'
import http.server
import json
import threading

import anthropic
import pydantic


class Report(pydantic.BaseModel):
    city: str = pydantic.Field(max_length=8)
    degrees: int = pydantic.Field(ge=-40, le=60)


class Service(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        sent.update(body["output_config"]["format"]["schema"]["properties"])
        answer = {"type": "text", "text": json.dumps({"city": "Oslo", "degrees": 2147})}
        message = {"id": "msg_1", "type": "message", "role": "assistant", "model": "m", "content": [answer]}
        message |= {"stop_reason": "end_turn", "stop_sequence": None, "usage": {"input_tokens": 1, "output_tokens": 1}}
        data = json.dumps(message).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *arguments):
        pass


sent = {}
service = http.server.HTTPServer(("127.0.0.1", 0), Service)
threading.Thread(target=service.serve_forever, daemon=True).start()
client = anthropic.Anthropic(api_key="none", base_url=f"http://127.0.0.1:{service.server_port}", max_retries=0)
ask = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "How is Oslo?"}]}
try:
    client.messages.parse(output_format=Report, **ask)
    raise SystemExit("the answer was accepted")
except pydantic.ValidationError as error:
    print("the answer:", error.errors()[0]["msg"])
print("the schema:", json.dumps(sent))
assert not {"minimum", "maximum", "maxLength"} & (sent["degrees"].keys() | sent["city"].keys())
assert "60" in sent["degrees"]["description"]
service.shutdown()
PYTHON
