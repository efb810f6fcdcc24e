"""An HTTP server with OpenAI's interface over an engine.

`protocol` reads bodies and `responses` writes them, in plain Python; `app` serves them over HTTP.
"""
