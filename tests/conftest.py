"""What all tests share."""

from __future__ import annotations

from hypothesis import settings

# An example that takes long says that the machine is busy, not that the code is wrong.
settings.register_profile("any-machine", deadline=None)
# For `make check`: a few examples of each property.
settings.register_profile("quick", parent=settings.get_profile("any-machine"), max_examples=15)
settings.load_profile("any-machine")
