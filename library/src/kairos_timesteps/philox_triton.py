"""Philox4x32-10 as one kernel of Triton, for GPUs: torch's integer operations take about a hundred kernels a draw.

`kairos_timesteps.randomness` uses this module where Triton is installed. The kernel and torch's
operations give equal integers.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 256  # counters of a program
_INTEGERS = ["first", "stride", "low", "high", "key_a", "key_c", "samples", "blocks", "counters"]


@triton.jit(do_not_specialize=_INTEGERS)  # type: ignore[untyped-decorator]
def _philox_kernel(  # type: ignore[no-untyped-def]
    words,  # int64 or float64 (counters, 4)
    index,  # int64 (samples,), or any pointer if INDEX_IS_RANGE
    first,  # first sample index, if INDEX_IS_RANGE
    stride,  # distance of two sample indices, if INDEX_IS_RANGE
    low,  # lower 32 bits of the first step
    high,  # upper 32 bits of every step
    key_a,  # lower half of the stream's key, mixed into word a
    key_c,  # upper half of the stream's key, mixed into word c
    samples,  # number of samples
    blocks,  # number of blocks per sample
    counters,  # steps * samples * blocks
    INDEX_IS_RANGE: tl.constexpr,
    CENTRED: tl.constexpr,  # write words as float64 in (-1, 1), see `write_words`
    BLOCK: tl.constexpr,
):
    """Compute Philox4x32-10 of each counter (step, sample, block), and write its four words, (counters, 4).

    The counters are flattened with the block as the last axis. A program computes BLOCK of them.
    """
    position = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = position < counters
    sample = position // blocks % samples
    if INDEX_IS_RANGE:
        column = first + stride * sample
    else:
        column = tl.load(index + sample, mask=inside, other=0)
    step = position // blocks // samples
    # adding 0 * position gives a scalar the shape of `position`
    a = (position % blocks).to(tl.uint32)
    b = column.to(tl.uint32)
    c = (low + step).to(tl.uint32)
    d = (high + 0 * position).to(tl.uint32)
    round_key_a = (key_a + 0 * position).to(tl.uint32)
    round_key_c = (key_c + 0 * position).to(tl.uint32)
    for _ in tl.static_range(10):
        product_a = a.to(tl.uint64) * 0xD2511F53
        product_c = c.to(tl.uint64) * 0xCD9E8D57
        a = (product_c >> 32).to(tl.uint32) ^ b ^ round_key_a
        c = (product_a >> 32).to(tl.uint32) ^ d ^ round_key_c
        b = product_c.to(tl.uint32)
        d = product_a.to(tl.uint32)
        round_key_a = (round_key_a.to(tl.uint64) + 0x9E3779B9).to(tl.uint32)
        round_key_c = (round_key_c.to(tl.uint64) + 0xBB67AE85).to(tl.uint32)
    _store(words + 4 * position, a, inside, CENTRED)
    _store(words + 4 * position + 1, b, inside, CENTRED)
    _store(words + 4 * position + 2, c, inside, CENTRED)
    _store(words + 4 * position + 3, d, inside, CENTRED)


@triton.jit  # type: ignore[untyped-decorator]
def _store(pointers, word, inside, CENTRED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Write words as int64, or as float64 in (-1, 1); the floats are exact."""
    if CENTRED:
        centred = (2 * word.to(tl.int64) - 0xFFFFFFFF).to(tl.float64) * 2.0**-32
        tl.store(pointers, centred, mask=inside)
    else:
        tl.store(pointers, word.to(tl.int64), mask=inside)


def write_words(words: Tensor, steps: range, index: range | Tensor, key: tuple[int, int]) -> None:
    """Fill a tensor with the words of all counters.

    Args:
        words: int64 or float64 (steps, samples, blocks, 4), contiguous. For float64, each word w becomes
            (w + 1/2)/2**31 - 1, the middle of one of 2**32 equal intervals of (-1, 1).
        steps: consecutive steps with equal upper halves of 32 bits.
        index: samples, a range or int64 (samples,) on the device of `words`.
        key: halves of the stream's key, each in [0, 2**32).
    """
    _, samples, blocks, _ = words.shape
    counters = words.numel() // 4
    if counters == 0:
        return
    is_range = isinstance(index, range)
    first, stride = (index.start, index.step) if isinstance(index, range) else (0, 0)
    low, high = steps.start & 0xFFFFFFFF, steps.start >> 32
    integers = (first, stride, low, high, *key)
    signed = [(value + 2**31) % 2**32 - 2**31 for value in integers]  # Triton compiles for 32 bits, whatever the value
    _philox_kernel[(triton.cdiv(counters, _BLOCK),)](
        words,
        words if is_range else index.contiguous(),  # type: ignore[union-attr]
        *signed,
        samples,
        blocks,
        counters,
        INDEX_IS_RANGE=is_range,
        CENTRED=words.is_floating_point(),
        BLOCK=_BLOCK,
    )
