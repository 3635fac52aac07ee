"""The pieces of several calls in one stream, as they come; who stops reading ends all of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from typing import Any

from runtime.calls import Call, Piece

PIECES_AHEAD_MAX = 64


async def close(iterator: AsyncIterator[Any]) -> None:
    """End an iterator's work now, where it can be ended."""
    aclose = getattr(iterator, "aclose", None)
    if aclose is not None:
        await aclose()


async def merged(calls: Sequence[Call], run: Callable[[Call], AsyncIterator[Piece]]) -> AsyncGenerator[tuple[int, Piece], None]:
    """(place of the call, piece) until every call has ended. The first error ends all and is raised."""
    ahead: asyncio.Queue[tuple[int, Piece | BaseException | None]] = asyncio.Queue(PIECES_AHEAD_MAX)

    async def read(place: int, call: Call) -> None:
        pieces = run(call)
        try:
            async for piece in pieces:
                await ahead.put((place, piece))
            await ahead.put((place, None))
        except Exception as error:
            await ahead.put((place, error))
        finally:
            await close(pieces)

    readers = [asyncio.create_task(read(place, call)) for place, call in enumerate(calls)]
    try:
        open_calls = len(readers)
        while open_calls:
            place, said = await ahead.get()
            if said is None:
                open_calls -= 1
            elif isinstance(said, Piece):
                yield place, said
            else:
                raise said
    finally:
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)
