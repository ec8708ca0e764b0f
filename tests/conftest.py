"""What holds for all tests: those under unit/ and contract/ never start Ray, whose start costs them seconds."""

import gc
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.redis_server import redis_server as redis_server  # a fixture, for all

# No time limits: how long an example takes is a matter of what else the machine does.
settings.register_profile("unhurried", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("unhurried")

_WITHOUT_RAY = [Path(__file__).parent / folder for folder in ("unit", "contract")]


def pytest_collection_finish() -> None:
    """What imports and collection have made stays: no search for garbage in any test goes through all of it again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def ray_is_not_started(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fails a test under unit/ or contract/ that starts Ray. Imports nothing, so it costs those tests nothing."""
    if not any(folder in request.path.parents for folder in _WITHOUT_RAY):
        yield
        return
    ray = sys.modules.get("ray")
    was_running = ray is not None and ray.is_initialized()
    if ray is not None:
        monkeypatch.setattr(ray, "init", _refuse_to_start)
    yield
    # The test may have been the first to import Ray.
    ray = sys.modules.get("ray")
    if ray is not None and ray.is_initialized() and not was_running:
        ray.shutdown()
        _refuse_to_start()


def _refuse_to_start(*args: object, **kwargs: object) -> None:
    pytest.fail("tests under tests/unit and tests/contract must not start Ray; such a test belongs in tests/on_ray")
