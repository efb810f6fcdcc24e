"""The page at `/`, a chat in the browser, and the header that lets it run and load nothing but itself."""

import base64
import functools
import hashlib
import pathlib
import re

PAGE = pathlib.Path(__file__).with_name("page.html")


@functools.cache
def text() -> str:
    """Returns the page."""
    return PAGE.read_text(encoding="utf-8")


@functools.cache
def headers() -> dict[str, str]:
    """Returns the headers of the page. The browser runs its own script and style, known by their hashes, alone."""
    sources = {}
    for element, content in re.findall(r"<(script|style)>(.*?)</\1>", text(), re.DOTALL):
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        sources[element] = f"'sha256-{digest}'"
    policy = {"default-src": "'none'", "connect-src": "'self'", "img-src": "data:"}
    policy |= {f"{element}-src": source for element, source in sources.items()}
    policy |= dict.fromkeys(("base-uri", "form-action", "frame-ancestors"), "'none'")
    return {
        "Content-Security-Policy": "; ".join(f"{name} {value}" for name, value in policy.items()),
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
    }
