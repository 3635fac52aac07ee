"""Table of formats, most specific first: the first whose recogniser accepts a file's head reads it."""

from __future__ import annotations

from envs.traces.formats import (
    aibrix,
    aiperf,
    azure,
    bailian,
    ballast,
    blis,
    burstgpt,
    guidellm,
    litellm_log,
    llmservingsim,
    mooncake,
    named_columns,
    servegen,
    splitwise_sim,
    vidur,
    vllm_bench,
    vllm_log,
    weka,
)
from envs.traces.formats.reader import Reader

READERS: dict[str, Reader] = {
    reader.name: reader
    for reader in (
        ballast.READER,
        azure.READER,
        burstgpt.READER,
        splitwise_sim.READER,
        vidur.READER,
        vidur.LENGTHS_READER,
        guidellm.READER,
        bailian.READER,
        weka.FLAT_READER,
        weka.SESSIONS_READER,
        litellm_log.READER,
        llmservingsim.READER,
        aibrix.READER,
        mooncake.READER,
        mooncake.TIMED_READER,
        aiperf.READER,
        vllm_bench.SHAREGPT_READER,
        vllm_bench.CUSTOM_READER,
        servegen.READER,
        blis.READER,
        vllm_log.READER,
        named_columns.READER,
    )
}
"""Format name -> reader."""
