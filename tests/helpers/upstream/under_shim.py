"""pytest plugin: the same tests on the host, with torch's names replaced by hand, as the baseline for HAL.

It uses none of HAL's routing, and restores nothing, because the process ends with the tests.
"""

import contextlib
import functools

import prepared
import pytest
import torch

HOST = torch.device("cpu")


def on_the_host(make):
    @functools.wraps(make)
    def wrapper(*args, **kwargs):
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs["device"] = HOST
        kwargs.pop("pin_memory", None)
        return make(*args, **kwargs)

    return wrapper


class Generators:
    def __getitem__(self, index):
        return torch.default_generator


class Stream:
    def __init__(self, *args, **kwargs):
        pass

    def wait_stream(self, other):
        pass

    def synchronize(self):
        pass


def type_name(own):
    def named(tensor, dtype=None, *args, **kwargs):
        if dtype is None:
            return own(tensor).replace("torch.", "torch.cuda.")
        return own(tensor, dtype, *args, **kwargs)

    return named


def over_gloo(own):
    def join(backend=None, *args, **kwargs):
        kwargs.pop("device_id", None)
        return own("gloo", *args, **kwargs)

    return join


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config):
    prepared.environment()
    device = torch.cuda
    device.current_device = lambda: HOST
    device.synchronize = device.empty_cache = lambda *args: None
    device.set_device = lambda *args: None
    device.get_rng_state = device.random.get_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    device.set_rng_state = lambda state, *args: torch.set_rng_state(state)
    device.manual_seed = torch.manual_seed
    device.default_generators = Generators()
    device._lazy_call = lambda call, **kwargs: call()
    device.Stream = Stream
    device.current_stream = lambda *args: Stream()
    device.stream = contextlib.nullcontext
    for name in ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"):
        setattr(device, name, lambda *args: 0)
    for name in ("tensor", "zeros", "ones", "empty", "empty_like", "rand", "randn", "randint", "arange", "full"):
        setattr(torch, name, on_the_host(getattr(torch, name)))
    torch.Tensor.cuda = lambda tensor, *args, **kwargs: tensor
    torch.nn.Module.cuda = lambda module, *args: module
    torch.Tensor.type = type_name(torch.Tensor.type)
    torch.distributed.init_process_group = over_gloo(torch.distributed.init_process_group)
    prepared.prepare()


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session):
    prepared.finish(session)
