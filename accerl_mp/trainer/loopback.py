"""torchrun whose stores listen on the rendezvous address alone: `python -m accerl_mp.trainer.loopback FLAGS...`, flags as torchrun's.

torch's TCPStore listens on all interfaces, whatever host it is given, and a store is a place where anybody may write.
"""

import runpy
import socket
import sys
from typing import Any

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import c10d_rendezvous_backend

_TCPStore = dist.TCPStore


class BoundStore(_TCPStore):
    """A TCPStore; the one that serves listens on `host_name` only. The port may be 0: a free one."""

    def __init__(self, host_name: str, port: int, *args: Any, **options: Any) -> None:
        if options.get("is_master"):
            listener = socket.create_server((host_name, port))
            port, options["master_listen_fd"] = listener.getsockname()[1], listener.detach()
        super().__init__(host_name, port, *args, **options)


def main() -> None:
    """Runs torchrun in this process, with that store in place of torch's."""
    dist.TCPStore = c10d_rendezvous_backend.TCPStore = BoundStore  # type: ignore[misc]
    sys.argv[0] = "torchrun"
    runpy.run_module("torch.distributed.run", run_name="__main__")


if __name__ == "__main__":
    main()
