import importlib.util
import os

import pytest
import torch
from hypothesis import HealthCheck, settings

import browser as chromium

# whichever code answers, it is the same in every run, also in the processes that tests start
os.environ.setdefault("DFWLAYER_COMPILED", "wait")

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

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


@pytest.fixture
def compiled_code():
    """Compiled code answers, and is waited for; without any, tests that ask for it are skipped."""
    from dfwlayer.engines import compiled  # which looks at the environment when it is imported

    if not compiled.available():
        pytest.skip("there is no compiled code")
    with compiled.using("wait"):
        yield


@pytest.fixture(scope="module")  # no longer, as nobody else can run an event loop meanwhile
def browser():
    """A real browser; where none is installed, tests that ask for it are skipped."""
    try:
        with chromium.launched() as started:
            yield started
    except chromium.MissingError as error:
        pytest.skip(str(error))


def pytest_configure():
    if INTERPRETED and importlib.util.find_spec("triton") is None:
        # a skip would say that the kernels were run
        raise pytest.UsageError("TRITON_INTERPRET=1 asks for Triton, which is not installed")


def pytest_collection_modifyitems(items):
    absent = {}
    if not torch.cuda.is_available():
        absent["cuda"] = "no CUDA device"
    if not INTERPRETED:
        absent["interpreter"] = "runs with make test-kernels"
    for item in items:
        for name, reason in absent.items():
            if item.get_closest_marker(name):
                item.add_marker(pytest.mark.skip(reason=reason))
