"""Worker processes, one per architecture, shared by the session."""

import pytest

from tests.emulator.worker import Worker


@pytest.fixture(scope="session")
def sm100():
    worker = Worker("sm_100a")
    yield worker
    worker.close()


@pytest.fixture(scope="session")
def sm90():
    worker = Worker("sm_90a")
    yield worker
    worker.close()
