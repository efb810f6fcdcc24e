"""jlade on the machines of a Ray cluster: `data` completes files of prompts, `serve` answers requests."""

MISSING = "jlade.integrations.ray needs Ray ({}): pip install 'jlade[ray]'"
