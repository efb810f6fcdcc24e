"""The lookahead algorithm: arrays in, arrays out, for one sequence; knows no model."""
