"""ZeroMQ sockets of a run: the only module that knows an address.

Every channel is an ipc socket in the run's own folder (0700), so two runs on one machine never meet. A `context` is a
`zmq.Context` or a `zmq.asyncio.Context`; the socket is of its kind.
"""

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import zmq
import zmq.asyncio

from accerl_mp.topology import RunPaths

MAX_MESSAGE_BYTES = 1 << 30
"""Frames above this close the connection: a damaged length must not become an allocation."""
_COPIED_BYTES = 1 << 16
_RECONNECT_MS, _RECONNECT_MAX_MS = 50, 1000

Context = zmq.Context | zmq.asyncio.Context
Socket = zmq.Socket


def new_context() -> zmq.Context:
    return zmq.Context()


def new_async_context() -> zmq.asyncio.Context:
    return zmq.asyncio.Context()


def endpoint(paths: RunPaths, channel: str, index: int = 0) -> str:
    """Address of one server's side of a channel. Example: `endpoint(paths, "requests", 1)`: inference/1's request socket."""
    return f"ipc://{paths.sockets}/{channel}-{index}"


def make_folder(paths: RunPaths) -> Path:
    """The run's socket folder, for this user alone. PermissionError if somebody else made it."""
    paths.sockets.mkdir(mode=0o700, exist_ok=True)
    if paths.sockets.stat().st_uid != os.getuid():
        raise PermissionError(f"{paths.sockets} belongs to another user")
    return paths.sockets


def bind_router(context: Context, paths: RunPaths, channel: str, index: int = 0) -> Any:
    """The server's side. Knows its clients by their fixed identity; one that was started again takes its predecessor's place.

    when full      a client that does not read loses messages to it once HWM are queued: replies are few and small
    a dead client  what is sent to it vanishes; who needs an answer asks again
    """
    socket = _socket(context, zmq.ROUTER)
    socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
    socket.bind(_bindable(paths, channel, index))
    return socket


def connect_dealer(context: Context, paths: RunPaths, channel: str, *, identity: str, index: int = 0) -> Any:
    """A client's side; `identity` is its process's name ("rollout/3"), the same after a restart.

    at the start   the server need not be there yet: messages wait in this socket
    a dead server  zmq connects again by itself; what was on its way may be lost, so each channel has its own way to notice
    """
    socket = _socket(context, zmq.DEALER)
    socket.setsockopt(zmq.IDENTITY, identity.encode())
    socket.connect(endpoint(paths, channel, index))
    return socket


def bind_pull(context: Context, paths: RunPaths, channel: str) -> Any:
    socket = _socket(context, zmq.PULL)
    socket.bind(_bindable(paths, channel, 0))
    return socket


def connect_push(context: Context, paths: RunPaths, channel: str) -> Any:
    socket = _socket(context, zmq.PUSH)
    socket.connect(endpoint(paths, channel))
    return socket


def wait_readable(sockets: Sequence[zmq.Socket], timeout_s: float) -> bool:
    """Sleep until one of these sockets has a message, at most `timeout_s`; whether one has."""
    poller = zmq.Poller()
    for socket in sockets:
        poller.register(socket, zmq.POLLIN)
    return bool(poller.poll(timeout_s * 1000))


def receive_all(router: zmq.Socket, limit: int = 64) -> list[tuple[bytes, list[bytes | memoryview]]]:
    """(sender's identity, frames) of every message that is there, up to `limit`. Does not wait. Large frames are views of zmq's memory."""
    messages: list[tuple[bytes, list[bytes | memoryview]]] = []
    with contextlib.suppress(zmq.Again):
        while len(messages) < limit:
            sender, *frames = router.recv_multipart(zmq.DONTWAIT, copy=False)
            messages.append((sender.bytes, [frame.buffer if len(frame) > _COPIED_BYTES else frame.bytes for frame in frames]))
    return messages


def _socket(context: Context, kind: int) -> Any:
    socket = context.socket(kind)
    # At the end nobody waits for a peer that has left already: what must arrive is acknowledged.
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, 10_000)
    socket.setsockopt(zmq.RCVHWM, 10_000)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, _RECONNECT_MAX_MS)
    return socket


def _bindable(paths: RunPaths, channel: str, index: int) -> str:
    make_folder(paths)
    return endpoint(paths, channel, index)
