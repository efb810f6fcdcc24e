"""Decoders: language models as pure functions; they know nothing of lookahead."""
