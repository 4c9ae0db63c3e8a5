"""pytest plugin: Megatron-LM's own unit tests on cpu_ref or the backend that HAL_BACKEND names, routed by HAL."""

import os

import prepared
import pytest

import hal
from hal.model.megatron.cuda_patches import CORE, hal_device
from hal.model.megatron.scripts import SCRIPTS, _torch_with

TESTS = {
    "torch.randn": lambda place, own: place.factory(own),
    "torch.randint": lambda place, own: place.factory(own),
    "torch.arange": lambda place, own: place.factory(own),
    "torch.full": lambda place, own: place.factory(own),
}
"""Names that only the tests use, and megatron-core does not."""


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config):
    prepared.environment()
    hal.use(os.environ.get("HAL_BACKEND", "cpu_ref"))
    routed = hal_device({**CORE, **SCRIPTS, **TESTS})
    routed.__enter__()
    early_config.add_cleanup(lambda: routed.__exit__(None, None, None))
    prepared.prepare(_torch_with(device_count=lambda: int(os.environ["WORLD_SIZE"])))


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session):
    prepared.finish(session)
