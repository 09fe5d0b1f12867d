"""Coroutines that belong together."""

import asyncio
from collections.abc import Coroutine
from typing import Any


async def first_to_end(*parts: Coroutine[Any, Any, None]) -> None:
    """Run all; as soon as one ends or raises, cancel the others, wait for them, and raise what it raised."""
    tasks = [asyncio.ensure_future(part) for part in parts]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        await cancel(tasks)


async def cancel(tasks: list[asyncio.Task[Any]]) -> None:
    """Cancel them and wait until they have left; what they raise meanwhile is dropped."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
