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
from numba import carray, njit, types
from numba.core import cgutils
from numba.extending import intrinsic

# offsets of the counters inside a rank's flag line (64 bytes: ranks never share a cache line)
PUBLISHED, DONE, REDUCED = 0, 8, 16
FLAG_BYTES = 64
SLOT_HEADER_BYTES = 64  # holds the message's length in bytes; keeps the numbers aligned for vector loads
DEPTH = 4  # slots per rank and lane: how many messages may be under way at once
BUDGET_NS = 300_000  # a kernel comes back this often, so that the caller can look for deadline and dead peers
BLOCK = 2048  # numbers summed at a time

sched_yield = types.ExternalFunction("sched_yield", types.int32())
_usleep = types.ExternalFunction("usleep", types.int32(types.uint32))
_clock_gettime = types.ExternalFunction("clock_gettime", types.int32(types.int32, types.intp))
_memcpy = types.ExternalFunction("memcpy", types.intp(types.intp, types.intp, types.intp))

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


@njit("int64(int64)", nogil=True, cache=True)
def read_flag(address):  # type: ignore[no-untyped-def]
    return load_acquire(address)


@njit("void(int64, int64)", nogil=True, cache=True)
def write_flag(address, value):  # type: ignore[no-untyped-def]
    store_release(address, value)


@njit("void(int64, int64, int64)", nogil=True, cache=True)
def copy_bytes(target, source, count):  # type: ignore[no-untyped-def]
    _memcpy(target, source, count)


@njit("int64(int64)", nogil=True, cache=True, inline="never")
def now_ns(clock):  # type: ignore[no-untyped-def]
    _clock_gettime(CLOCK_MONOTONIC, clock)
    return load_acquire(clock) * 1_000_000_000 + load_acquire(clock + 8)


@njit("int64(int64, int64, int64, int64, int64, int64, int64)", nogil=True, cache=True)
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
                _usleep(SLEEP_US)
    return -1


@njit("int64(int64, int64, int64, int64, int64, int64, int64, int64, int64, int64, int64)", nogil=True, cache=True)
def publish(flags, size, rank, sequence, slot, source, count, announced, pauses, clock, waited_ns):  # type: ignore[no-untyped-def]
    """Copy `count` bytes into this rank's slot of message `sequence` and publish it; the slot last held `sequence` - DEPTH.

    `announced`: a number for the readers, put into the slot's header. Returns: -1, or the rank that has not yet read what the slot held.
    """
    missing = await_flags(flags + DONE, size, sequence - DEPTH + 1, pauses, clock, waited_ns, BUDGET_NS)
    if missing < 0:
        store_release(slot, announced)
        if count > 0:
            _memcpy(slot + SLOT_HEADER_BYTES, source, count)
        store_release(flags + rank * FLAG_BYTES + PUBLISHED, sequence + 1)
    return missing


@njit("int64(int64, int64, int64, int64, int64, int64)", nogil=True, cache=True)
def await_published(flags, size, sequence, pauses, clock, waited_ns):  # type: ignore[no-untyped-def]
    """Wait for message `sequence` of all ranks. Returns: -1, or the rank that has not published."""
    return await_flags(flags + PUBLISHED, size, sequence + 1, pauses, clock, waited_ns, BUDGET_NS)


@njit("int64(int64, int64, int64, int64, int64, int64)", nogil=True, cache=True)
def await_reduced(flags, size, sequence, pauses, clock, waited_ns):  # type: ignore[no-untyped-def]
    """Wait until all ranks have summed their piece of message `sequence`. Returns: -1, or the rank that has not."""
    return await_flags(flags + REDUCED, size, sequence + 1, pauses, clock, waited_ns, BUDGET_NS)


@njit("void(int64, int64, int64, int64, int64)", nogil=True, cache=True)
def sum_float(slots, stride, size, target, count):  # type: ignore[no-untyped-def]
    """target[i] = ((slot 0)[i] + (slot 1)[i]) + ...: float32, in rank order, so every rank gets the same bits.

    `slots`: address of rank 0's numbers, those of rank r lie `stride` x r bytes further. `target` may be one of them.
    """
    summed = carray(float_pointer(target), count)
    if size == 1:
        _memcpy(target, slots, count * 4)
        return
    # in blocks that stay in the first-level cache, through a buffer that cannot alias: the loops then become vector code
    for begin in range(0, count, BLOCK):
        length = min(BLOCK, count - begin)
        first = carray(float_pointer(slots + begin * 4), length)
        second = carray(float_pointer(slots + stride + begin * 4), length)
        if size == 2:
            for i in range(length):
                summed[begin + i] = first[i] + second[i]
        elif size == 3:
            third = carray(float_pointer(slots + 2 * stride + begin * 4), length)
            for i in range(length):
                summed[begin + i] = (first[i] + second[i]) + third[i]
        else:
            third = carray(float_pointer(slots + 2 * stride + begin * 4), length)
            fourth = carray(float_pointer(slots + 3 * stride + begin * 4), length)
            for i in range(length):
                summed[begin + i] = ((first[i] + second[i]) + third[i]) + fourth[i]
            for rank in range(4, size):
                further = carray(float_pointer(slots + rank * stride + begin * 4), length)
                for i in range(length):
                    summed[begin + i] += further[i]


@njit("void(int64, int64, int64, int64, int64)", nogil=True, cache=True)
def sum_bfloat(slots, stride, size, target, count):  # type: ignore[no-untyped-def]
    """As `sum_float` for bfloat16: summed in float32 in rank order and rounded once, to nearest even."""
    total = np.empty(BLOCK, np.float32)
    summed = carray(short_pointer(target), count)
    for begin in range(0, count, BLOCK):
        length = min(BLOCK, count - begin)
        for rank in range(size):
            part = carray(short_pointer(slots + rank * stride + begin * 2), length)
            if rank == 0:
                for i in range(length):
                    total[i] = float_of_bits(np.uint32(part[i]) << np.uint32(16))
            else:
                for i in range(length):
                    total[i] += float_of_bits(np.uint32(part[i]) << np.uint32(16))
        for i in range(length):
            bits = bits_of_float(total[i])
            rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
            # a NaN whose payload the rounding would carry into the exponent stays a quiet NaN
            is_nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
            summed[begin + i] = np.uint16((bits >> np.uint32(16)) | np.uint32(0x40)) if is_nan else np.uint16(rounded)


@njit("int64(int64, int64, int64, int64, int64, int64, int64, int64, int64, int64, int64)", nogil=True, cache=True)
def all_reduce_float(flags, size, rank, sequence, slots, stride, tensor, count, pauses, clock, stage):  # type: ignore[no-untyped-def]
    """A whole all-reduce of one message of float32 in one call, for speed: publish, wait, sum, release the slots.

    `stage`: 0 to begin; afterwards what the last call returned. Returns: -1 when done, else (stage << 8) | missing rank: the caller looks
    around and calls again with that stage (it may then have waited for long, so that from then on the wait sleeps).
    """
    waited_ns = np.int64(0) if stage == 0 else YIELD_UNTIL_NS
    if stage < 512:
        missing = publish(flags, size, rank, sequence, slots + rank * stride, tensor, count * 4, count * 4, pauses, clock, waited_ns)
        if missing >= 0:
            return 256 | missing
    missing = await_flags(flags + PUBLISHED, size, sequence + 1, pauses, clock, waited_ns, BUDGET_NS)
    if missing >= 0:
        return 512 | missing
    sum_float(slots + SLOT_HEADER_BYTES, stride, size, tensor, count)
    store_release(flags + rank * FLAG_BYTES + DONE, sequence + 1)
    return -1


@njit("int64(int64, int64, int64, int64, int64, int64, int64, int64)", nogil=True, cache=True)
def copy_politely(target, source, count, flags, size, piece, patience_ns, clock):  # type: ignore[no-untyped-def]
    """Copy `count` bytes in pieces of `piece`, none of them begun while a rank of the lane at `flags` is inside a collective.

    Waits for that at most `patience_ns` per piece, so that a lane that is never at rest cannot starve the copy. Returns: ns waited.
    """
    waited_ns = 0
    for begin in range(0, count, piece):
        started_ns = 0
        while True:
            busy = False
            for rank in range(size):
                line = flags + rank * FLAG_BYTES
                busy |= load_acquire(line + PUBLISHED) > load_acquire(line + DONE)
            if not busy:
                break
            time_ns = now_ns(clock)
            if started_ns == 0:
                started_ns = time_ns
            elif time_ns - started_ns > patience_ns:
                break
            _usleep(SLEEP_US)
        if started_ns:
            waited_ns += now_ns(clock) - started_ns
        _memcpy(target + begin, source + begin, min(piece, count - begin))
    return waited_ns
