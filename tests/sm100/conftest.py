"""One process for sm_100a: the DSL fixes its target at import, and pytest's own process must stay as it is."""

import pytest

from tests.emulator.worker import Worker


@pytest.fixture(scope="session")
def blackwell():
    worker = Worker("sm_100a")
    yield worker
    worker.close()
