"""Requirements of Megatron-LM's own unit tests besides a device: a world, compiled helpers, no downloads."""

import os
import socket
import types

import torch

from hal.model.megatron.scripts import _installed_helpers


class View(types.ModuleType):
    """A module with some names replaced."""

    def __init__(self, module, **answers):
        super().__init__(module.__name__)
        self.__dict__.update(answers, wrapped=module)

    def __getattr__(self, name):
        return getattr(self.__dict__["wrapped"], name)


def environment():
    """A world of one process, for tests that read torchrun's variables."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    world = {"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    for name, value in world.items():
        os.environ.setdefault(name, value)
    torch.set_num_threads(1)


def prepare():
    """To be called when the names of the device are routed."""
    import megatron.core.datasets.utils
    import megatron.core.utils
    import tests.test_utils.python_scripts.download_unit_tests_dataset as download
    from packaging.version import Version

    megatron.core.utils.get_te_version = lambda: Version("0.0")
    download.download_and_extract_asset = lambda *args, **kwargs: True
    if _installed_helpers():  # the datasets' compiled part, which a checkout has to build
        megatron.core.datasets.utils.compile_helpers = lambda: None
    import tests.unit_tests.test_utilities as utilities

    # Every process of the tests has a device of its own.
    utilities.torch = View(torch, cuda=View(torch.cuda, device_count=lambda: int(os.environ["WORLD_SIZE"])))


def finish(session):
    """A rank that ends with an error also ends the others, before these have written their results."""
    if os.environ["WORLD_SIZE"] != "1":
        session.exitstatus = 0
