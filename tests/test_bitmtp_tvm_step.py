"""The decode step in numpy against the oracle."""

import pytest
from step_engine import TwinOps
from step_properties import StepProperties
from step_stops import StopProperties


@pytest.fixture(scope="module")
def ops():
    return TwinOps()


class TestTwin(StepProperties, StopProperties):
    pass
