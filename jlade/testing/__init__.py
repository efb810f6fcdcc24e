"""Checks that a decoder or a constraint of your own follows its protocol."""

from jlade.testing.constraint import check_constraint
from jlade.testing.decoder import check_decoder

__all__ = ["check_constraint", "check_decoder"]
