import pytest
import torch
from hypothesis import HealthCheck, settings

# the same examples in every run: a failure is found again, and CI does not flicker
settings.register_profile(
    "dfwlayer", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("dfwlayer")

# the problems are small: more threads only wait for each other, above all under pytest -n
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("cuda"):
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
