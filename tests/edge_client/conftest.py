"""The network and the images that the client's tests train with."""

from tests.small_network import make_data, make_model

__all__ = ["make_data", "make_model"]
