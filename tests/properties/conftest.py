"""Counts of inputs leave with the process."""

from tests.properties import tally


def pytest_sessionfinish(session):
    tally.save()
