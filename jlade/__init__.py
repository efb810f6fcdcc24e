"""jlade: exact lookahead decoding of language models in compiled JAX programs."""

import lazy_loader

__version__ = "0.1.0"

# __init__.pyi lists the public names. Their modules are imported when they are used, so that the command can show its
# progress before JAX is imported, which takes a second.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
