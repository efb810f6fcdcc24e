"""A check that a decoder of your own follows `jlade.models.base.Decoder`."""

from jlade.testing.decoder import check_decoder

__all__ = ["check_decoder"]
