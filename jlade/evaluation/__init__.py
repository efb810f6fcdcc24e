"""Evaluation: what a generation did, step by step."""
