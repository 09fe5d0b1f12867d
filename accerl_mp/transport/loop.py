"""Sockets of an event loop: whatever has come is taken at once, and a send never waits.

pyzmq's own asyncio sockets make a future a message and look at the socket after each. Here a wake-up of the loop reads all
messages that are there and hands each to a function.
"""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import zmq

from accerl_mp.transport.sockets import Socket

try:
    from uvloop import run as _run
except ImportError:  # vLLM's own server needs it, so it is there wherever vLLM was installed with its needs
    from asyncio import run as _run

_MAX_TAKEN = 64
"""Messages of one wake-up; then other callbacks of the loop have their turn."""


def run_loop(main: Coroutine[Any, Any, None]) -> None:
    """Run to the end in an event loop of its own: uvloop's where it is installed."""
    _run(main)


class LoopSocket:
    """A plain zmq socket that belongs to the running event loop.

    waits for      nothing: messages are handed to `on_message(frames)` by the loop, in the order in which they came
    when full      `send` says False; the message is gone, and whoever needs an answer asks again
    at the end     `close()`; no message is handed on after it
    a dead peer    nothing comes, and zmq connects again by itself
    """

    def __init__(self, socket: Socket, on_message: Callable[[list[bytes]], None]) -> None:
        self._socket, self._on_message = socket, on_message
        self._loop = asyncio.get_running_loop()
        self._descriptor = socket.getsockopt(zmq.FD)
        self._will_look = False
        self._fault: BaseException | None = None
        self._loop.add_reader(self._descriptor, self._look)
        self._look_soon()

    def send(self, *frames: bytes, copy: bool = True) -> bool:
        """Hand one message to zmq; whether it took it. Without `copy` its frames must not change until they are gone."""
        self._look_soon()
        try:
            self._socket.send_multipart(frames, zmq.DONTWAIT, copy=copy)
        except zmq.Again:
            return False
        return True

    def check(self) -> None:
        """Raises what `on_message` has raised: a loop only logs it. Call it now and then."""
        if self._fault is not None:
            raise self._fault

    def close(self) -> None:
        self._loop.remove_reader(self._descriptor)
        self._on_message = lambda _frames: None
        self._socket.close()

    def _look_soon(self) -> None:
        """The descriptor tells only of what zmq has not dealt with: a send may deal with an arrival, and nothing would wake us."""
        if not self._will_look:
            self._will_look = True
            self._loop.call_soon(self._look)

    def _look(self) -> None:
        """Take what is there. zmq has dealt with every arrival once it says that there is nothing."""
        self._will_look = False
        if self._socket.closed:
            return
        for _ in range(_MAX_TAKEN):
            try:
                frames = self._socket.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                return
            try:
                self._on_message(frames)
            except BaseException as error:
                self._fault = error
                raise
            if self._socket.closed:
                return
        self._look_soon()
