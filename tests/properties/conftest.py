"""Counts of inputs leave with every test, so that a run that is stopped has them too."""

from tests.properties import tally


def pytest_runtest_logfinish(nodeid, location):
    tally.save()
