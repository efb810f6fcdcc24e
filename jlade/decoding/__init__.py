"""Decoding on the device: a batch, a model and the algorithm.

`prefill` reads prompts into the KV cache, `start` makes the state before the first step, `step` takes a state to the
next one, and `decode` does all of it until every sequence has ended. All are pure and traceable.
"""
