"""What groups are thought to hold of a prompt, and that routing heeds it."""

from __future__ import annotations

import asyncio

import numpy as np

from runtime.scheduling.prefix_memory import BLOCK_TOKENS, BLOCKS_MAX, PrefixMemory, block_keys
from tests.runtime.scheduling.service_parts import Scripted, call, collect, dispatcher, with_service


def test_leading_full_blocks_count():
    memory = PrefixMemory(np.array([True, True, False]))
    first = tuple(range(300))  # four full blocks
    memory.remember(0, block_keys(first), 10_000)
    memory.remember(2, block_keys(first), 10_000)
    assert memory.hits(block_keys(first)).tolist() == [4 * BLOCK_TOKENS, 0, 0]
    assert memory.hits(block_keys(first[:200] + (9,) * 100)).tolist() == [3 * BLOCK_TOKENS, 0, 0]
    assert memory.hits(block_keys((7, *first[1:]))).tolist() == [0, 0, 0]
    assert len(block_keys(range(10**6))) == BLOCKS_MAX and block_keys(()) == ()
    memory.forget(0)
    assert memory.hits(block_keys(first)).sum() == 0


def test_a_pool_holds_what_it_holds():
    """A pool of 640 tokens keeps ten blocks: the oldest prompt goes, its beginning last."""
    memory = PrefixMemory(np.array([True]))
    prompts = [tuple(range(1000 * i, 1000 * i + 320)) for i in range(3)]  # five blocks each
    for prompt in prompts[:2]:
        memory.remember(0, block_keys(prompt), 640)
    assert [int(memory.hits(block_keys(prompt))[0]) for prompt in prompts[:2]] == [320, 320]
    memory.remember(0, block_keys(prompts[2][:192]), 640)
    assert int(memory.hits(block_keys(prompts[0]))[0]) == 2 * BLOCK_TOKENS


def test_a_conversation_goes_back_to_where_it_was():
    backends = [Scripted(f"g{i}", i, keeps_prefixes=True) for i in range(4)]

    async def body(service):
        prompts = {i: tuple(range(10_000 * i, 10_000 * i + 1600)) for i in range(6)}
        homes = {}
        for turn in range(4):
            for i, prompt in prompts.items():
                asked = call(len(prompt), 8, prompt_ids=prompt)
                await collect(service, asked)
                (home,) = [backend.name for backend in backends if asked.call_id in backend.started]
                assert homes.setdefault(i, home) == home, turn
                prompts[i] = prompt + (turn,) * 64

    asyncio.run(with_service(dispatcher(backends), body))
