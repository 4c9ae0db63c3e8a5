"""How the workers of a job find each other: through a file on one node, through node 0's store on several.

On one node nothing listens on a port: the store is a file in a folder that only this user can read. On several nodes
the store is a TCP server without authentication, so the network between the nodes must be trusted.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

from hal.errors import HalError

STORE = "HAL_STORE"
"""Environment variable: folder with the file stores of the attempts to run a job of one node."""


ATTEMPT = "HAL_ATTEMPT"
"""Environment variable: how often the launcher has started the workers again."""


def attempt() -> int:
    """How often the launcher has started this job's workers again."""
    return int(os.environ.get(ATTEMPT, "0"))


def use_file_store() -> None:
    """In a worker of a job of one node: has torch's env:// use the job's file instead of a TCP server."""
    folder = os.environ.get(STORE)
    if not folder:
        return
    from torch.distributed import FileStore  # type: ignore[attr-defined]
    from torch.distributed.rendezvous import _rendezvous_handlers

    def handler(url: str, timeout: timedelta | None = None, **kwargs: Any) -> Iterator[tuple[Any, int, int]]:
        # One file per attempt: a killed worker may have left an incomplete record in that of the attempt before.
        path = Path(folder) / f"attempt_{attempt()}"
        world = int(os.environ["WORLD_SIZE"])
        store = FileStore(str(path), -1)  # -1: the file is removed with its folder, by the launcher
        if timeout is not None:
            store.set_timeout(timeout)
        yield store, int(os.environ["RANK"]), world
        raise RuntimeError("env:// cannot rendezvous a second time")

    _rendezvous_handlers["env"] = handler


def local(address: str) -> Any:
    """The rendezvous of one node. Workers find the file by `use_file_store`."""
    from torch.distributed import HashStore, PrefixStore  # type: ignore[attr-defined]
    from torch.distributed.elastic.rendezvous.api import RendezvousInfo, RendezvousStoreInfo

    store, rounds = HashStore(), iter(range(1 << 62))

    def join() -> RendezvousInfo:
        # For scripts that start their own server; HAL does not listen on this port.
        info = RendezvousStoreInfo(address, _free_port(address))
        return RendezvousInfo(PrefixStore(f"round_{next(rounds)}", store), 0, 1, info)

    return _handler(join, agent_store=False)


def fixed(address: str, port: int, rank: int, nodes: int, timeout: float) -> Any:
    """The rendezvous of nodes that are known in advance, which needs only the store of node 0."""
    from torch.distributed.elastic.rendezvous.api import RendezvousInfo, RendezvousStoreInfo

    store = _tcp_store(address, port, rank, timeout)
    info = RendezvousStoreInfo(address, store.port)
    return _handler(lambda: RendezvousInfo(store, rank, nodes, info), agent_store=True)


def elastic(address: str, port: int, rank: int, least: int, most: int, timeout: float) -> Any:
    """The rendezvous of `least` to `most` nodes that may leave and return; node 0 must stay, since it has the store."""
    from torch.distributed.elastic.rendezvous.api import RendezvousParameters
    from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

    seconds = str(max(1, int(timeout)))
    return get_rendezvous_handler(
        RendezvousParameters(
            backend="c10d",
            endpoint=f"{address}:{port}",
            run_id="hal",
            min_nodes=least,
            max_nodes=most,
            local_addr=address if rank == 0 else None,
            is_host=rank == 0,
            join_timeout=seconds,
            read_timeout=seconds,
        )
    )


def _handler(join: Any, *, agent_store: bool) -> Any:
    from torch.distributed.elastic.rendezvous.api import RendezvousHandler, RendezvousInfo

    class Handler(RendezvousHandler):
        def get_backend(self) -> str:
            return "hal"

        @property
        def use_agent_store(self) -> bool:
            return agent_store

        def next_rendezvous(self) -> RendezvousInfo:
            info: RendezvousInfo = join()
            return info

        def is_closed(self) -> bool:
            return False

        def set_closed(self) -> None:
            return None

        def num_nodes_waiting(self) -> int:
            return 0

        def get_run_id(self) -> str:
            return "hal"

        def shutdown(self) -> bool:
            return True

    return Handler()


def _free_port(address: str) -> int:
    with socket.create_server((address, 0)) as server:
        port: int = server.getsockname()[1]
    return port


def _tcp_store(address: str, port: int, rank: int, timeout: float) -> Any:
    """The job's store. Its socket is bound here, because torch would listen on every interface."""
    from torch.distributed import DistNetworkError, DistStoreError, TCPStore  # type: ignore[attr-defined]

    limit = timedelta(seconds=timeout)
    if rank:
        try:
            return TCPStore(address, port, is_master=False, timeout=limit)
        except (DistNetworkError, DistStoreError) as error:
            raise HalError(
                f"launch: node 0 at {address}:{port} did not answer within {timeout:g} s; is it started, and is the "
                f"port open? ({' '.join(str(error).splitlines()[:1])})"
            ) from error
    try:
        family, _, _, _, place = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(place)
        listener.listen(1024)
    except OSError as error:
        raise HalError(
            f"launch: node 0 cannot listen on {address}:{port}: {error.strerror or error}; choose another "
            "--master-port, or a --master-addr of this machine"
        ) from error
    return TCPStore(
        address,
        listener.getsockname()[1],
        is_master=True,
        wait_for_workers=False,
        timeout=limit,
        master_listen_fd=listener.detach(),
    )
