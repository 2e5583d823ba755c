from collections.abc import Iterator

import pytest

from fedmpq import kernels


@pytest.fixture(params=kernels.supported_isas())
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Runs a test once per instruction set this machine has, the scalar twin among them."""
    before = kernels.isa()
    kernels.force_isa(request.param)
    yield request.param
    kernels.force_isa(before)
