"""Evaluation on any model and data: methods, measures, the paper's tables and figures, and the page of a trace."""
