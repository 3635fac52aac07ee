"""Finding the longest held prefix, against trying every slot."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.torch_tp.prefix_index import PrefixIndex

BLOCK = 3
ids = st.lists(st.integers(0, 1), min_size=1, max_size=14)


def common(a, b, limit):
    n = 0
    while n < min(len(a), len(b), limit) and a[n] == b[n]:
        n += 1
    return n


@settings(max_examples=200)
@given(
    held=st.dictionaries(st.integers(0, 5), st.tuples(ids, st.integers(0, 1), st.integers(0, 14)), max_size=6),
    asked=ids,
    dropped=st.sets(st.integers(0, 5)),
)
def test_found_prefixes_are_true_and_as_long_in_blocks_as_any(held, asked, dropped):
    index = PrefixIndex(BLOCK)
    for slot, (tokens, version, computed) in held.items():
        for count in (1, min(computed, len(tokens))):
            index.put(slot, version, tokens, min(count, len(tokens)))
    for slot in dropped:
        index.drop(slot)
    live = {slot: entry for slot, entry in held.items() if slot not in dropped}
    for version in (0, 1):
        best = max(
            (
                common(tokens, asked, min(max(computed, 1), len(tokens), len(asked) - 1))
                for tokens, v, computed in live.values()
                if v == version
            ),
            default=0,
        )
        found = index.longest(asked, version)
        if best < BLOCK:
            assert found is None
        else:
            slot, count = found
            tokens, of_version, computed = live[slot]
            assert of_version == version and count <= max(computed, 1) and tokens[:count] == asked[:count] and count < len(asked)
            assert count // BLOCK == best // BLOCK


def test_nothing_is_left_after_all_slots_are_dropped():
    index = PrefixIndex(BLOCK)
    for slot in range(4):
        index.put(slot, 0, [1] * 10, 10)
    for slot in range(4):
        index.drop(slot)
        index.drop(slot)
    assert len(index) == 0 and index._slots_of == {}
