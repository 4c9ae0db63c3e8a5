"""`hal serve`: a trained model behind an OpenAI-style completions endpoint, by default for this machine only."""

from __future__ import annotations

import argparse
import contextlib
import os
import socket
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hal.errors import HalError

from .arguments import Parser

if TYPE_CHECKING:
    from hal.model.inference.load import Pretrained

KEY = "HAL_SERVE_API_KEY"
"""Environment variable: the API key that clients must present; if unset, none is required."""


def parser() -> Parser:
    """The options of `hal serve`."""
    from hal.model.inference import load

    command_parser = Parser("serve", description=f"{__doc__} Clients must present ${KEY} where that is set.")
    add = command_parser.add_argument
    add("--host", default="127.0.0.1", help="address to listen on (default 127.0.0.1: this machine only)")
    add("--port", type=int, default=8000, help="port to listen on (default 8000; 0: any free one)")
    add("--model-name", metavar="NAME", help="name that clients use (default: the folder of --load)")
    add("--max-batch-size", type=int, default=8, metavar="N", help="at most N = prompts x n per request (default 8)")
    add("--max-waiting", type=int, default=16, metavar="N", help="requests that may wait; more get 429 (default 16)")
    add("--max-per-client", type=int, metavar="N", help="of them from one address (default: all; more get 429)")
    add("--max-body-bytes", type=int, default=1 << 20, metavar="N", help="largest request (default 1 MiB)")
    load.add_arguments(command_parser)
    return command_parser


def main(argv: Sequence[str]) -> int:
    """Runs `hal serve` with these arguments, until interrupted."""
    from hal.model.inference import load

    command_parser = parser()
    arguments = command_parser.parse_args(argv)
    bounds = {"port": 0, "max_batch_size": 1, "max_waiting": 0, "max_per_client": 1, "max_body_bytes": 1}
    for name, least in bounds.items():
        if getattr(arguments, name) is not None and getattr(arguments, name) < least:
            command_parser.error(f"--{name.replace('_', '-')} must be at least {least}")
    if arguments.port > 65535:
        command_parser.error("--port must be at most 65535")

    # The port is bound before the model is loaded and other ranks wait for requests, so that an error is reported
    # early. A process that only starts the ranks does not bind it.
    rank = "0" if getattr(arguments, "nproc_per_node", 1) == 1 else None
    with contextlib.ExitStack() as stack:
        listener = None
        if os.environ.get("RANK", rank) == "0":
            listener = stack.enter_context(_bound(arguments.host, arguments.port))
        return load.run_command("serve", argv, arguments, lambda model: _serve(arguments, model, listener))


def _serve(arguments: argparse.Namespace, model: Pretrained, listener: socket.socket | None) -> int:
    try:
        import uvicorn

        from hal.model.apps.serving.app import LOOPBACK, Limits, build_app
        from hal.model.apps.serving.connections import server_config
    except ImportError as error:
        raise HalError(f"serving needs fastapi and uvicorn ({error}): pip install 'torch-hal[serve]'") from None
    from hal.model.apps.serving.worker import Worker, follow

    model.engine.require_one_replica("hal serve")
    model.engine.new_cache(1, 1)  # raises for a model that cannot generate
    if not model.engine.lead:
        follow(model)
        return 0
    worker = Worker(model, arguments.max_waiting)
    name = arguments.model_name or os.path.basename(os.path.normpath(arguments.load))
    limits = Limits(arguments.max_body_bytes, arguments.max_batch_size, per_client=arguments.max_per_client)
    key, loopback = os.environ.get(KEY) or None, arguments.host in LOOPBACK
    if not loopback and key is None:
        print(f"hal serve: anyone who reaches {arguments.host} can use this model; see ${KEY}", file=sys.stderr)
    app = build_app(worker, name, limits, api_key=key, loopback=loopback)

    class Server(uvicorn.Server):
        """Prints its address once it listens."""

        async def startup(self, sockets: object = None) -> None:
            await super().startup(sockets=sockets)  # type: ignore[arg-type]
            for server in self.servers if self.started else ():
                host, port = server.sockets[0].getsockname()[:2]
                print(f"serving {name} at http://{host}:{port}/v1 (Ctrl-C ends)", flush=True)

    settings = server_config(app, host=arguments.host, port=arguments.port, seconds=limits.seconds)
    server = Server(settings)
    assert listener is not None
    with contextlib.suppress(KeyboardInterrupt):
        server.run(sockets=[listener])
    return 0 if server.started else 1


def _bound(host: str, port: int) -> socket.socket:
    """A socket bound to that address (IPv4 if the name has one). It does not listen before the model is loaded."""
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, *_, address = min(addresses, key=lambda entry: entry[0] != socket.AF_INET)
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
        except BaseException:
            listener.close()
            raise
        return listener
    except OSError as error:
        raise HalError(
            f"--host {host} --port {port}: {error.strerror}; give another, e.g. --port 0 for any free one"
        ) from None
