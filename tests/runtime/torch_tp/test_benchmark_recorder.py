"""The engine under the benchmarks is the real one: it records what its ranks did."""

from __future__ import annotations

import pytest

from benchmarks.tp_recorder import RecordedEngine, decode_tokens_per_s
from runtime.torch_tp.supervisor import RankSettings


def test_records_of_a_real_engine(dreams):
    """Four answers of 12 tokens: every token is in a record, every decode step has a busy time for each rank and operation."""
    with RecordedEngine.begin(str(dreams), [RankSettings(), RankSettings(speed=0.5)]) as engine:
        answers, records = engine.answer_all([(1, 397, 261)] * 4, 12)
    assert [len(answer.tokens) for answer in answers] == [12] * 4
    assert sum(record.tokens for record in records) == 48
    decoding = [record for record in records if record.is_decode]
    assert decoding and all(record.busy_s.shape[0] == 2 and (record.busy_s >= 0).all() for record in records)
    assert sum(record.busy_s.sum() for record in decoding) > 0
    assert decode_tokens_per_s(records, 4) > 0
    with pytest.raises(ValueError, match="let the answers be longer"):
        decode_tokens_per_s(records, 5)
