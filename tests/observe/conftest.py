"""A device's thread for the tests of what an operator sees."""

from tests.scheduler.conftest import worker as worker
