"""jlade on the machines of a Ray cluster: `data` completes files of prompts, `serve` answers requests."""
