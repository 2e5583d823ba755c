"""What clients and runs may be called."""

from __future__ import annotations

import re

NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}", re.ASCII)
"""Letters, digits and "_.-"."""
