"""Continuous batching: requests share the rows of one decode state, each from its arrival to the end of its text.

`Engine` runs the loop; `scheduler` decides which request has a row and knows no model; `running` has the requests in
their rows, as many rows as they need; `width` has the costs of steps for each number of rows; `rows` are the programs
that put a request into its row and make steps; `job` and `request` are the two sides of a request, the engine's and the
caller's.
"""
