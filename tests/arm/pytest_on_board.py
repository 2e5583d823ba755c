"""pytest on an emulated board, with few hypothesis examples: `LAUNCHER pytest_on_board.py LAUNCHER ...`."""

import sys

import pytest

EXAMPLES = 10


class FewExamples:
    """Emulation is slow, and what is new here is the machine: the host runs all examples."""

    def pytest_configure(self) -> None:
        from hypothesis import HealthCheck, settings

        settings.register_profile(
            "emulated",
            max_examples=EXAMPLES,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        )
        settings.load_profile("emulated")


if __name__ == "__main__":
    # The host's kernel cannot start the board's interpreter by itself.
    sys.executable = sys.argv[1]
    sys.exit(pytest.main(["-p", "no:cacheprovider", *sys.argv[2:]], plugins=[FewExamples()]))
