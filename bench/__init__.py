"""Measurements: a module is a command (`python -m bench.planes`); `--json` makes it print one JSON object."""
