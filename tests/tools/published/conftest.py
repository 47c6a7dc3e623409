"""Published rows, read once for all tests of a worker."""

import pytest

from tools.validate.published.cases import PublishedCase, read_cases


@pytest.fixture(scope="session")
def cases() -> dict[str, PublishedCase]:
    """The packaged rows by their IDs."""
    return {case.inputs.case: case for case in read_cases()}
