"""pytest plugin: Megatron-LM's own unit tests on cpu_ref or the backend that HAL_BACKEND names, routed by HAL."""

import os

import prepared
import pytest

import hal
from hal.model.megatron.cuda_patches import hal_device


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config):
    prepared.environment()
    hal.use(os.environ.get("HAL_BACKEND", "cpu_ref"))
    routed = hal_device()
    routed.__enter__()
    early_config.add_cleanup(lambda: routed.__exit__(None, None, None))
    prepared.prepare()


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session):
    prepared.finish(session)
