"""aider: a conversation of three turns about a file, whole and as a stream. It asks for no tools and no format."""

from agent import LAST, MODEL, THEN, feature
from aider.coders import Coder
from aider.io import InputOutput
from aider.models import Model

model = Model(f"openai/{MODEL}")
model.extra_params = {"max_tokens": 256}
for stream in (False, True):
    io = InputOutput(pretty=False, yes=True)
    coder = Coder.create(model, "ask", io, fnames=["hello.py"], use_git=False, stream=stream, map_tokens=0)
    for turn, message in enumerate(("What does it print?", THEN, LAST), 1):
        with feature(f"{'stream' if stream else 'chat'}: turn {turn}"):
            assert coder.run(message)
            assert not coder.io.num_error_outputs, "aider shows an error"
