"""The four methods of a backend on the host, for tests that define their own implementations."""

import inspect

import torch

import hal


class HostBackend(hal.Backend):
    """Runs on the CPU, in one process; has no implementations."""

    name = "host"

    def probe(self):
        return hal.Probe(True, 1, "the CPU")

    def device(self, index=0):
        return torch.device("cpu")

    def synchronize(self):
        pass

    def comm(self, ranks=None, *, timeout=600.0):
        return hal.SingleRankComm()


SOURCE = f"import torch, hal\n\n{inspect.getsource(HostBackend)}"
"""The class as text, for tests that write a package to a file."""
