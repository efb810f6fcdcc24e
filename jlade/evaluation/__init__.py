"""Evaluation on any model and data: data sets, methods, measures, and the tables and figures of the paper."""
