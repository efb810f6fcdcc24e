"""What a server answers before it has a model."""

from starlette.types import Receive, Scope, Send

from jlade.server import guard
from jlade.server.app import Service
from jlade.server.fields import RequestError


class Loading:
    """The application of a service, once there is one. Before, it refuses each request in OpenAI's form.

    Attributes:
      service: None while the model loads.
      doing: what takes place meanwhile.
    """

    def __init__(self, service: Service | None = None):
        self.service, self.doing = service, "loading"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self.service is not None:
            await self.service.app(scope, receive, send)
        elif scope["type"] == "http":
            await guard.refuse(RequestError(f"the server starts: {self.doing}", status=503))(scope, receive, send)
