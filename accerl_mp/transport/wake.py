"""Sleep until a word in shared memory changes, and wake who does: Linux's futex, which Python has no name for."""

import ctypes
import platform
import time

import numpy as np

_SYSCALL = {"x86_64": 202, "aarch64": 98}.get(platform.machine())
_WAIT, _WAKE = 0, 1
_EVERYBODY = 2**31 - 1
_libc = ctypes.CDLL(None, use_errno=True)


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def sleep_while(word: np.ndarray, value: int, timeout_s: float) -> None:
    """Sleep while `word` (one int64 in shared memory) is `value`.

    waits for      `wake` of another process that has changed the word, at most `timeout_s`
    unblocked by   signals, too: look again afterwards
    a dead peer    the timeout; likewise where there is no futex
    """
    if _SYSCALL is None:
        time.sleep(timeout_s)
        return
    limit = _Timespec(int(timeout_s), int(timeout_s % 1 * 1e9))
    low = ctypes.c_uint32(value & 0xFFFFFFFF)  # the kernel compares 32 bits: the lower ones, which come first
    _libc.syscall(_SYSCALL, ctypes.c_void_p(word.ctypes.data), _WAIT, low, ctypes.byref(limit), None, 0)


def wake(word: np.ndarray) -> None:
    """Everybody who sleeps on `word`, in whatever process."""
    if _SYSCALL is not None:
        _libc.syscall(_SYSCALL, ctypes.c_void_p(word.ctypes.data), _WAKE, _EVERYBODY, None, None, 0)
