"""Continuous batching: requests share the rows of one decode state, each from its arrival to the end of its text.

`Engine` takes requests, and the thread of its `worker` makes rounds. Two parts know no model: `scheduler` decides which
request has a row, and `prefixes` which beginnings of texts are kept. `reading` reads prompts from these beginnings, of
which `copies` are made; `pages` hold what can be shared, and `remembered` the texts that have ended. `running` has the
requests in their rows, as many rows as they need, and `width` the costs of steps for each number of rows. The programs
that put a request into its row and make steps are `rows`. `job` and `request` are the two sides of a request: the
engine's and the caller's.
"""
