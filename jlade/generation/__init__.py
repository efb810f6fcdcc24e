"""Generation on the host: prompts in, text out."""
