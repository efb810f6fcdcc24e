"""Constraints: what a text may be, decided on the device for every token that a step verifies.

A constraint is a pytree of arrays and pure functions over a small state (`constraint.py`). In a step the state of each
draft follows from that of its parent, and each row of logits is masked by it, before temperature and filters. So the
text is that of plain constrained decoding, for the same key.
"""
