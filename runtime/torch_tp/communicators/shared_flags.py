"""Compiled leaves that wait on, publish to and sum up memory shared between processes, without the interpreter lock.

Flags are 64-bit counters that only grow, each written by one rank. They are read with acquire and written with release
order (LLVM would hoist a plain load out of its loop), so what a rank wrote before it published is seen by whoever saw the
counter. Addresses are plain integers: the callers keep the mapping alive.
"""

from __future__ import annotations

import platform
from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, types
from numba.core import cgutils
from numba.extending import intrinsic

from envs.perf_model.kernel_cache import cached_njit

# offsets of the counters inside a rank's flag line (64 bytes: ranks never share a cache line)
PUBLISHED, DONE, REDUCED = 0, 8, 16
FLAG_BYTES = 64
SLOT_HEADER_BYTES = 64  # holds the message's length in bytes; keeps the numbers aligned for vector loads
DEPTH = 4  # slots per rank and lane: how many messages may be under way at once
BUDGET_NS = 300_000  # a kernel comes back this often, so that the caller can look for deadline and dead peers
BLOCK = 2048  # numbers summed at a time
AHEAD = 2  # chunks of a sum that are published before the first of them is summed
LANE_FIELDS = ("flags", "size", "rank", "ring", "stride", "chunk_bytes", "pieces_from", "pauses", "clock")

sched_yield = types.ExternalFunction("sched_yield", types.int32())
sleep_us = types.ExternalFunction("usleep", types.int32(types.uint32))
_clock_gettime = types.ExternalFunction("clock_gettime", types.int32(types.int32, types.intp))
copy_memory = types.ExternalFunction("memcpy", types.intp(types.intp, types.intp, types.intp))

CLOCK_MONOTONIC = 1
ON_X86 = platform.machine() in ("x86_64", "AMD64")
YIELD_UNTIL_NS = 200_000  # after this long a wait sleeps instead of yielding: the peer computes, and needs the core more than we do
SLEEP_US = 20


@intrinsic
def load_acquire(typing: Any, address: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = builder.inttoptr(arguments[0], ir.IntType(64).as_pointer())
        return builder.load_atomic(pointer, "acquire", 8)

    return types.int64(types.int64), generate


@intrinsic
def store_release(typing: Any, address: Any, value: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = builder.inttoptr(arguments[0], ir.IntType(64).as_pointer())
        builder.store_atomic(arguments[1], pointer, "release", 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@intrinsic
def relax(typing: Any) -> Any:
    """Tell the core that this is a spin (its sibling gets the pipeline)."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if ON_X86:
            kind = ir.FunctionType(ir.VoidType(), [])
            builder.call(cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.sse2.pause"), [])
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def float_pointer(typing: Any, address: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], ir.FloatType().as_pointer())

    return types.CPointer(types.float32)(types.int64), generate


@intrinsic
def byte_pointer(typing: Any, address: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], ir.IntType(8).as_pointer())

    return types.CPointer(types.int8)(types.int64), generate


@intrinsic
def short_pointer(typing: Any, address: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], ir.IntType(16).as_pointer())

    return types.CPointer(types.uint16)(types.int64), generate


@intrinsic
def float_of_bits(typing: Any, bits: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.FloatType())

    return types.float32(types.uint32), generate


@intrinsic
def bits_of_float(typing: Any, value: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.IntType(32))

    return types.uint32(types.float32), generate


@intrinsic
def long_pointer(typing: Any, address: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], ir.IntType(64).as_pointer())

    return types.CPointer(types.int64)(types.int64), generate


@cached_njit("int64(int64)", nogil=True)
def read_flag(address):  # type: ignore[no-untyped-def]
    return load_acquire(address)


@cached_njit("void(int64, int64)", nogil=True)
def write_flag(address, value):  # type: ignore[no-untyped-def]
    store_release(address, value)


@cached_njit("int64(int64)", nogil=True, inline="never")
def now_ns(clock):  # type: ignore[no-untyped-def]
    _clock_gettime(CLOCK_MONOTONIC, clock)
    return load_acquire(clock) * 1_000_000_000 + load_acquire(clock + 8)


@cached_njit("int64(int64, int64, int64, int64, int64, int64, int64)", nogil=True)
def await_flags(flags, size, target, pauses, clock, waited_ns, budget_ns):  # type: ignore[no-untyped-def]
    """Wait until the counter at `flags` + FLAG_BYTES x rank has reached `target` for every rank.

    Spins for `pauses` polls, then yields the core, then sleeps in naps; `waited_ns` tells how long the caller has waited already.
    `clock`: 16 bytes of the caller's own. Returns: -1, or the rank still missing after `budget_ns`, so that the caller can look around.
    """
    polls = 0
    started_ns = 0
    for rank in range(size):
        address = flags + rank * FLAG_BYTES
        while load_acquire(address) < target:
            polls += 1
            if polls <= pauses:
                relax()
                continue
            time_ns = now_ns(clock)
            if started_ns == 0:
                started_ns = time_ns
            elif time_ns - started_ns > budget_ns:
                return rank
            if waited_ns + time_ns - started_ns < YIELD_UNTIL_NS:
                sched_yield()
            else:
                sleep_us(SLEEP_US)
    return -1


@cached_njit("boolean(int64, int64, int64)", nogil=True)
def all_reached(flags, size, target):  # type: ignore[no-untyped-def]
    """Whether the counters of all ranks have reached `target`."""
    reached = True
    for rank in range(size):
        reached &= load_acquire(flags + rank * FLAG_BYTES) >= target
    return reached


@cached_njit("int64(int64, int64, int64, int64, int64, int64, int64, int64, int64, int64, int64)", nogil=True)
def publish(flags, size, rank, sequence, slot, source, count, announced, pauses, clock, waited_ns):  # type: ignore[no-untyped-def]
    """Copy `count` bytes into this rank's slot of message `sequence` and publish it; the slot last held `sequence` - DEPTH.

    `announced`: a number for the readers, put into the slot's header. Returns: -1, or the rank that has not yet read what the slot held.
    """
    missing = await_flags(flags + DONE, size, sequence - DEPTH + 1, pauses, clock, waited_ns, BUDGET_NS)
    if missing < 0:
        store_release(slot, announced)
        if count > 0:
            copy_memory(slot + SLOT_HEADER_BYTES, source, count)
        store_release(flags + rank * FLAG_BYTES + PUBLISHED, sequence + 1)
    return missing


@cached_njit("int64(int64, int64, int64, int64, int64, int64)", nogil=True)
def await_published(flags, size, sequence, pauses, clock, waited_ns):  # type: ignore[no-untyped-def]
    """Wait for message `sequence` of all ranks. Returns: -1, or the rank that has not published."""
    return await_flags(flags + PUBLISHED, size, sequence + 1, pauses, clock, waited_ns, BUDGET_NS)


@cached_njit("void(int64, int64, int64, int64, int64, int64)", nogil=True)
def sum_float(slots, stride, size, own, target, count):  # type: ignore[no-untyped-def]
    """target[i] = ((part 0)[i] + (part 1)[i]) + ...: float32, in rank order, so every rank gets the same bits.

    `slots`: address of rank 0's numbers, those of rank r lie `stride` x r bytes further; but the part of rank `own` is
    what `target` holds (-1: all of the two or more parts are in their slots, and `target` is none of them).
    """
    kept = np.empty(BLOCK if own > 1 else 0, np.float32)
    # in blocks that stay in the first-level cache; with fresh arrays that begin at zero the loops become vector code
    for begin in range(0, count, BLOCK):
        length = min(BLOCK, count - begin)
        total = carray(float_pointer(target + begin * 4), length)
        first = carray(float_pointer(slots + begin * 4), length)
        following = 2
        if own == 0:
            following = 1
        elif own == 1:
            for i in range(length):
                total[i] = first[i] + total[i]
        else:
            if own > 1:
                kept[:length] = total
            second = carray(float_pointer(slots + stride + begin * 4), length)
            for i in range(length):
                total[i] = first[i] + second[i]
        for rank in range(following, size):
            part = kept if rank == own else carray(float_pointer(slots + rank * stride + begin * 4), length)
            for i in range(length):
                total[i] += part[i]


@cached_njit("void(int64, int64, int64, int64, int64, int64)", nogil=True)
def sum_bfloat(slots, stride, size, own, target, count):  # type: ignore[no-untyped-def]
    """As `sum_float` for bfloat16: summed in float32 in rank order and rounded once, to nearest even."""
    total = np.empty(BLOCK, np.float32)
    for begin in range(0, count, BLOCK):
        length = min(BLOCK, count - begin)
        rounded = carray(short_pointer(target + begin * 2), length)
        for rank in range(size):
            part = rounded if rank == own else carray(short_pointer(slots + rank * stride + begin * 2), length)
            if rank == 0:
                for i in range(length):
                    total[i] = float_of_bits(np.uint32(part[i]) << np.uint32(16))
            else:
                for i in range(length):
                    total[i] += float_of_bits(np.uint32(part[i]) << np.uint32(16))
        for i in range(length):
            bits = bits_of_float(total[i])
            nearest = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
            # a NaN whose payload the rounding would carry into the exponent stays a quiet NaN
            is_nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
            rounded[i] = np.uint16((bits >> np.uint32(16)) | np.uint32(0x40)) if is_nan else np.uint16(nearest)


@cached_njit("void(int64, int64, int64, int64, int64, int64, int64)", nogil=True)
def _sum(slots, stride, size, own, target, count, width):  # type: ignore[no-untyped-def]
    if width == 4:
        sum_float(slots, stride, size, own, target, count)
    else:
        sum_bfloat(slots, stride, size, own, target, count)


@cached_njit("int64(int64, int64, int64)", nogil=True)
def _cut(count, size, rank):  # type: ignore[no-untyped-def]
    """Where the piece begins that `rank` sums: on a cache line."""
    return count if rank == size else count * rank // size // 32 * 32


@cached_njit("int64(int64, int64, int64, int64, int64, int64, int64, int64, int64)", nogil=True)
def advance_sum(lane, first, tensor, count, width, progress, leader, waited_ns, only_publish):  # type: ignore[no-untyped-def]
    """Carry an in-place all-reduce as far as it goes: publish chunks ahead, wait for the others', sum, release.

    From PIECES_FROM bytes per chunk, three ranks and more sum a piece each and copy the other pieces, instead of all summing everything.

    Args: `lane`: address of the int64 fields LANE_FIELDS. `first`: message number of the first chunk. `tensor`, `count`,
        `width`: numbers of 4 bytes (float32) or 2 (bfloat16). `progress`: address of three int64, zero at the start and
        again at the end: chunks published, chunks summed, whether the present chunk's own piece is summed.
        `leader`: -1 for all ranks, or the only rank that wants the sum; the others are done when they have published.
        `only_publish`: do not wait for anything.
    Returns: -1 when done (or nothing more to publish), else the rank missing after BUDGET_NS: look around and call again.
    """
    field = carray(long_pointer(lane), 9)
    flags, size, rank, ring, stride = field[0], field[1], field[2], field[3], field[4]
    chunk_bytes, pieces_from, pauses, clock = field[5], field[6], field[7], field[8]
    done = carray(long_pointer(progress), 3)
    per_chunk = chunk_bytes // width
    chunks = max(1, (count + per_chunk - 1) // per_chunk)
    line = flags + rank * FLAG_BYTES
    while done[1] < chunks:
        while done[0] < chunks and done[0] - done[1] < AHEAD:
            sequence = first + done[0]
            if sequence - load_acquire(line + DONE) >= DEPTH:
                break
            slot = ring + (sequence % DEPTH * size + rank) * stride
            begin = done[0] * per_chunk
            # the only rank that sums needs nothing but its flag in the slot
            part_bytes = 0 if leader == rank else min(per_chunk, count - begin) * width
            free = only_publish == 0 or all_reached(flags + DONE, size, sequence - DEPTH + 1)
            if not free:
                return -1
            missing = publish(flags, size, rank, sequence, slot, tensor + begin * width, part_bytes, part_bytes, pauses, clock, waited_ns)
            if missing >= 0:
                return missing
            done[0] += 1
        if only_publish:
            return -1
        sequence = first + done[1]
        if leader >= 0 and leader != rank:
            done[1] += 1
            store_release(line + DONE, sequence + 1)
            continue
        begin = done[1] * per_chunk
        part = min(per_chunk, count - begin)
        slots = ring + sequence % DEPTH * size * stride + SLOT_HEADER_BYTES
        target = tensor + begin * width
        in_pieces = leader < 0 and size > 2 and part * width >= pieces_from
        if done[2] == 0:
            missing = await_flags(flags + PUBLISHED, size, sequence + 1, pauses, clock, waited_ns, BUDGET_NS)
            if missing >= 0:
                return missing
            mine = _cut(part, size, rank) if in_pieces else 0
            length = _cut(part, size, rank + 1) - mine if in_pieces else part
            _sum(slots + mine * width, stride, size, rank, target + mine * width, length, width)
            if in_pieces:
                # nobody else reads this piece of this slot before the flag says that it holds the sum
                copy_memory(slots + rank * stride + mine * width, target + mine * width, length * width)
                store_release(line + REDUCED, sequence + 1)
            done[2] = 1
        if in_pieces:
            missing = await_flags(flags + REDUCED, size, sequence + 1, pauses, clock, waited_ns, BUDGET_NS)
            if missing >= 0:
                return missing
            for peer in range(size):
                if peer != rank:
                    theirs = _cut(part, size, peer)
                    length = _cut(part, size, peer + 1) - theirs
                    copy_memory(target + theirs * width, slots + peer * stride + theirs * width, length * width)
        done[2] = 0
        done[1] += 1
        store_release(line + DONE, sequence + 1)
    done[0] = done[1] = 0
    return -1


@cached_njit("int64(int64, int64, int64, int64, int64, int64, int64)", nogil=True)
def advance_broadcast(lane, first, address, count, progress, leader, waited_ns):  # type: ignore[no-untyped-def]
    """Carry a broadcast of `count` bytes from `leader` as far as it goes; arguments and result as for `advance_sum`."""
    field = carray(long_pointer(lane), 9)
    flags, size, rank, ring, stride = field[0], field[1], field[2], field[3], field[4]
    chunk_bytes, pauses, clock = field[5], field[7], field[8]
    done = carray(long_pointer(progress), 3)
    chunks = max(1, (count + chunk_bytes - 1) // chunk_bytes)
    while done[0] < chunks:
        sequence = first + done[0]
        begin = done[0] * chunk_bytes
        part = min(chunk_bytes, count - begin)
        slot = ring + (sequence % DEPTH * size + leader) * stride
        if rank == leader:
            missing = publish(flags, size, rank, sequence, slot, address + begin, part, part, pauses, clock, waited_ns)
            if missing >= 0:
                return missing
        else:
            if await_flags(flags + leader * FLAG_BYTES + PUBLISHED, 1, sequence + 1, pauses, clock, waited_ns, BUDGET_NS) >= 0:
                return leader
            copy_memory(address + begin, slot + SLOT_HEADER_BYTES, part)
        store_release(flags + rank * FLAG_BYTES + DONE, sequence + 1)
        done[0] += 1
    done[0] = 0
    return -1
