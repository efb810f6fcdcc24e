"""An HTTP server with OpenAI's interface over an engine.

A request: `guard` lets it in; a route of `app` reads its body by `protocol`; `choices` are its requests of the engine;
`writer` writes their texts.

- Start: `served_model` makes the engine and the reader of bodies; `lifecycle` is the socket, connections and signals;
  `keeping` saves remembered answers from one run to the next.
- HTTP: `app` has the routes, `guard` the keys, hosts and sizes, `metrics` counts, `page` is the chat in a browser.
- Bodies: `fields` is JSON and its errors; `kinds` reads values; `body_fields` is the table of all fields, by route;
  `structured` has the fields that ask for a grammar; `protocol` makes prompts and options of all these.
- Answers: `choices` follows the requests of a body, `writer` writes whole responses and chunks.
- Forms: `examples` are answers as a chat template writes them; `thoughts` reads off them the marks around thoughts and
  content, `call_formats` how calls are written; `tools` makes the grammar of calls, `calls` reads answers back.
- Apart: `responses` is `/v1/responses`, `token_ids` vLLM's `/inference/v1/generate`; `records` are bodies in files, for
  `jlade generate`.
"""
