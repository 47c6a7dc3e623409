"""A step that a test writes by hand."""

from __future__ import annotations

import pytest

from tests.plan.rehearsed_time.steps import StepWriter


@pytest.fixture
def step() -> StepWriter:
    return StepWriter()
