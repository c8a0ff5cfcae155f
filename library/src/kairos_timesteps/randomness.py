"""Random numbers as functions of (seed, stream, step, index): a resumed run needs no random state.

One counter-based generator, Philox4x32-10 of Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3". A
sample's random numbers depend on its index in the global batch, not on micro-batch, rank or device. Streams are
separate, and the same for all methods of a seed, so that comparisons between methods are paired.

No library has these integers on both kinds of device: torch draws from Mersenne Twister on the CPU, and numpy's Philox
is 4x64 and runs on the CPU only. Golden values in the tests freeze every draw.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from kairos_timesteps.lazy import Tensor, torch

Shape = tuple[int, ...]
Index: TypeAlias = range | Tensor
Step: TypeAlias = int | range | Tensor
Device: TypeAlias = "torch.device | str"
Kind: TypeAlias = "Callable[[Tensor, torch.dtype], Tensor]"  # converts words to numbers of a type
WriteWords: TypeAlias = Callable[[Tensor, range, Index, tuple[int, int]], None]  # type of philox_triton.write_words

_LOW = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)  # what the two halves of the key grow by every round
_TRIES = 7  # candidates for a Gamma variate: none is accepted with probability below 0.05**7 = 8e-10
_AHEAD, _SMALL = 16, 2**14  # steps that are drawn at a time, where a step needs no more words than this
_FAILED: list[Exception] = []  # of Triton in this process: its kernels are not tried again
# key schedules by (seed, stream): integers for torch, arrays for numpy
_KEYS: dict[tuple[int, str], Sequence[Any]] = {}


@dataclass(frozen=True)
class Stream:
    """Named random stream of a seed: random numbers for the samples `index` of step `step`.

    - `index` contains n indices in the global batch (or image numbers) in [0, 2**32), as a range or an int64 tensor
      (n,). `step` is in [0, 2**63). The seed is any integer.
    - A step may be an int64 tensor () on the device, for graphs that are replayed. It may be a range of steps with
      equal upper halves, which gives results a leading axis.
    - Integers are equal on all devices, real numbers to 1e-6 relative. On one kind of device all numbers are bit-equal,
      however the indices are split.
    - All methods use the words of the stream. Numbers that must be independent need streams of different names.
    """

    seed: int
    name: str

    def __post_init__(self) -> None:
        """Hash the key now: a compiled graph cannot."""
        if (self.seed, self.name) not in _KEYS:
            digest = hashlib.sha256(f"{self.seed}/{self.name}".encode()).digest()
            schedule = key_schedule(int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:8], "little"))
            _KEYS[self.seed, self.name] = schedule, [tuple(map(np.array, row)) for row in schedule]

    def words(self, step: Step, index: Index, count: int, device: Device = "cpu") -> Tensor:
        """Return the first `count` words of each sample, int64 (n, count) in [0, 2**32)."""
        words = _words(self, step, index, count, str(device))
        return words if isinstance(step, range) else words[0]

    def uniform(self, step: Step, index: Index, shape: Shape = (), device: Device = "cpu") -> Tensor:
        """Return uniform numbers in [0, 1), float64 (n, *shape): the upper 53 bits of two words."""
        numbers = _numbers(self, _uniform, step, index, 2 * math.prod(shape), device, torch.float64)
        return numbers.reshape(*numbers.shape[:-1], *shape)

    def normal(
        self, step: Step, index: Index, shape: Shape = (), device: Device = "cpu", dtype: torch.dtype | None = None
    ) -> Tensor:
        """Return standard normal numbers (n, *shape), by default float32, of 2**32 values between -6.3 and 6.3."""
        numbers = _numbers(self, _normal, step, index, math.prod(shape), device, dtype or torch.float32)
        return numbers.reshape(*numbers.shape[:-1], *shape)

    def integers(self, step: Step, high: int, index: Index, shape: Shape = (), device: Device = "cpu") -> Tensor:
        """Return integers in [0, high), int64 (n, *shape), high up to 2**53; a probability is off by at most 2**-53."""
        return (self.uniform(step, index, shape, device) * high).long()

    def beta(self, step: Step, index: Index, a: Tensor, b: Tensor, shape: Shape = ()) -> Tensor:
        """Return draws of Beta(a_i, b_i) for each sample, float64 (n, *shape), on the device of a and b, positive (n,).

        They are made of two Gamma variates (Marsaglia and Tsang 2000), in logarithms. Each variate is the first
        accepted of a fixed number of candidates. For small a and b a draw may round to exactly 0 or 1.
        """
        count = math.prod(shape)  # draws of a sample
        alpha = torch.stack((a, b), 1).detach().double().repeat_interleave(count, 0)  # (n count, 2)
        words = self.words(step, index, count * 2 * (2 * _TRIES + 1), alpha.device)
        axes = words.shape[:-2]  # (steps,) of a range of steps, otherwise ()
        words = words.reshape(*axes, len(alpha), 2, 2 * _TRIES + 1)  # no -1: a batch may be empty
        z, log_u = _normal(words[..., :_TRIES]), _open(words[..., _TRIES:]).log_()
        d = alpha[..., None] + 2 / 3  # of Gamma(a + 1), which times u^(1/a) is Gamma(a)
        log_v = (1 + z / (9 * d).sqrt()).clamp(min=1e-30).log_() * 3  # a clamped candidate is never accepted
        accepted = log_u[..., :_TRIES] < z**2 / 2 + d * (1 - log_v.exp() + log_v)
        first = (accepted * torch.arange(_TRIES, 0, -1, device=a.device)).argmax(-1, keepdim=True)
        log_gamma = (d.log() + log_v.gather(-1, first))[..., 0] + log_u[..., -1] / alpha  # (*axes, n count, 2)
        # not sigmoid, whose last bit depends on a number's place in the batch
        return (1 / (1 + (log_gamma[..., 1] - log_gamma[..., 0]).exp())).view(*axes, len(a), *shape)


def philox(counter: Sequence[Any], constants: Sequence[Any]) -> tuple[Any, ...]:
    """Apply ten rounds of Philox4x32 to a counter: four arrays of 32-bit words that broadcast.

    Args:
        counter: the four words, int64 arrays of numpy or torch.
        constants: multipliers, shift and mask, and keys of the rounds, as `key_schedule` returns them.

    Returns:
        The four words of the result, int64.
    """
    a, b, c, d = counter
    (multiplier_a, multiplier_c), (shift, lower), *keys = constants
    for key_a, key_c in keys:
        product_a, product_c = a * multiplier_a, c * multiplier_c  # wrap, but their 64 bits are right
        a, c = (product_c >> shift) ^ b, (product_a >> shift) ^ d
        a ^= key_a
        c ^= key_c
        a &= lower  # drops the sign that the shift has copied, and the upper half of b
        c &= lower
        b, d = product_c, product_a
    return a, b & lower, c, d & lower


def key_schedule(low: int, high: int) -> list[tuple[int, int]]:
    """Return the constants of `philox`: multipliers, shift and mask, and the halves of each round's key."""
    rounds = [(low + n * _WEYL[0] & _LOW, high + n * _WEYL[1] & _LOW) for n in range(10)]
    return [_MULTIPLIERS, (32, _LOW), *rounds]


def _words(stream: Stream, step: Step, index: Index, count: int, device: str) -> Tensor:
    """Return the words of one step or several, int64 (steps, n, count)."""
    fused = _fused_words(stream, step, index, count, device)
    if fused is not None:
        return fused
    fixed = device == "cpu" and not torch.compiler.is_compiling()  # the same integers; numpy costs half the time
    library: Any = np if fixed and isinstance(step, (int, range)) else torch
    on = {} if library is np else {"device": device}  # numpy takes one from 2.0 on
    if isinstance(index, range):
        index = library.arange(index.start, index.stop, index.step, **on)
    column = library.asarray(index, **on)[:, None]  # (n, 1)
    block = library.arange(-(-count // 4), **on)  # (blocks,)
    if isinstance(step, torch.Tensor):
        low, high = (step & _LOW).view(1, 1, 1), (step >> 32).view(1, 1, 1)
    else:
        begin, steps = (step.start, len(step)) if isinstance(step, range) else (step, 1)
        low = library.arange(steps, **on)[:, None, None] + (begin & _LOW)  # (steps, 1, 1)
        high = library.full((1, 1, 1), begin >> 32, **on)
    words = library.empty((len(low), len(column), len(block), 4), dtype=library.int64, **on)
    rounds = philox((block, column, low, high), _KEYS[stream.seed, stream.name][library is np])
    words[..., 0], words[..., 1], words[..., 2], words[..., 3] = rounds
    # not torch.as_tensor, which would move an array to torch's default device
    tensor = torch.from_numpy(words) if library is np else words
    return tensor.flatten(2)[..., :count]


def _fused_words(
    stream: Stream, step: Step, index: Index, count: int, device: str, centred: bool = False
) -> Tensor | None:
    """Return the words, computed by one kernel of Triton; None if Triton cannot be used.

    `centred` words are float64 numbers in (-1, 1), see `_centred`.

    An error of Triton is reported by one warning. Triton is then not used again in this process.
    """
    if not device.startswith("cuda") or isinstance(step, torch.Tensor) or torch.compiler.is_compiling():
        return None
    if _FAILED or not torch.cuda.is_initialized():  # a simulated device does not initialise CUDA
        return None
    try:
        with torch.cuda.device(device):
            write_words = _load_kernel(device)
            return None if write_words is None else _write(write_words, stream, step, index, count, device, centred)
    except Exception as error:  # a GPU that Triton does not support, no compiler for its launcher
        _FAILED.append(error)
        reason = f"Triton failed; torch computes random numbers, with about a hundred kernels a draw: {error}"
        warnings.warn(reason, stacklevel=2)
        return None


def _write(
    write_words: WriteWords, stream: Stream, step: Step, index: Index, count: int, device: str, centred: bool
) -> Tensor:
    """Return the words that a kernel of Triton writes, int64 (steps, n, count), or float64 if `centred`."""
    steps = step if isinstance(step, range) else range(int(step), int(step) + 1)
    samples = index if isinstance(index, range) else torch.as_tensor(index).to(device)
    dtype = torch.float64 if centred else torch.int64
    words = torch.empty((len(steps), len(samples), -(-count // 4), 4), dtype=dtype, device=device)
    write_words(words, steps, samples, _KEYS[stream.seed, stream.name][0][2])
    return words.flatten(2)[..., :count]


@functools.cache
def _load_kernel(device: str) -> WriteWords | None:
    """Return the function that runs Triton's kernel, after a comparison on the device; None if Triton is missing.

    Raises:
        RuntimeError: the kernel's words differ from those of the CPU.
    """
    if importlib.util.find_spec("triton") is None:
        return None
    from kairos_timesteps.philox_triton import write_words

    stream, samples = Stream(0, "timesteps"), range(3, 300, 7)
    expected = _words(stream, 7, samples, 6, "cpu")
    for centred in (False, True):
        words = _write(write_words, stream, 7, samples, 6, device, centred).cpu()
        if not torch.equal(words, _centred(expected) if centred else expected):
            raise RuntimeError("its random numbers differ from those of the CPU")
    return write_words


def _numbers(
    stream: Stream, kind: Kind, step: Step, index: Index, count: int, device: Device, dtype: torch.dtype
) -> Tensor:
    """Convert `count` words of each sample to numbers by `kind`, (n, numbers), or (steps, n, numbers).

    Small draws are computed and cached for 16 steps at a time, see `_ahead`; the result is a copy.
    """
    if isinstance(step, int) and isinstance(index, range) and len(index) * count <= _SMALL:
        return _ahead(stream, kind, step // _AHEAD, index, count, str(device), dtype)[step % _AHEAD].clone()
    numbers = _convert(stream, kind, step, index, count, str(device), dtype)
    return numbers if isinstance(step, range) else numbers[0]


@functools.lru_cache(maxsize=64)
def _ahead(stream: Stream, kind: Kind, block: int, index: range, count: int, device: str, dtype: torch.dtype) -> Tensor:
    """Return the numbers of a prefetch block of steps, (steps, n, numbers); the steps share the cost of the calls."""
    return _convert(stream, kind, range(block * _AHEAD, (block + 1) * _AHEAD), index, count, device, dtype)


def _convert(
    stream: Stream, kind: Kind, step: Step, index: Index, count: int, device: str, dtype: torch.dtype
) -> Tensor:
    """Draw words and convert them to numbers by `kind`, (steps, n, numbers)."""
    if kind is _normal:
        centred = _fused_words(stream, step, index, count, device, centred=True)
        if centred is not None:
            return _normal_of_centred(centred, dtype)
    return kind(_words(stream, step, index, count, device), dtype)


def _open(words: Tensor) -> Tensor:
    """Convert each word to a uniform number in (0, 1), float64: the middle of one of 2**32 equal intervals."""
    return words.double().add_(0.5).mul_(2.0**-32)


def _uniform(words: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Convert each pair of neighbouring words to a uniform number in [0, 1), by default float64."""
    return ((words[..., 0::2] << 21) + (words[..., 1::2] >> 11)).double().mul_(2.0**-53).to(dtype or torch.float64)


def _normal(words: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Convert each word to a standard normal number that is not 0, by default float64; the inversion is in float64."""
    return _normal_of_centred(_centred(words), dtype or torch.float64)


def _centred(words: Tensor) -> Tensor:
    """Convert each word to the middle of one of 2**32 equal intervals of (-1, 1), float64, exactly."""
    if not _fuses_conversions(words):
        return words.double().sub_(2**31 - 0.5).mul_(2.0**-31)
    first = torch.tensor(2.0**-32 - 1, dtype=torch.float64, device="cpu")
    return torch.add(first, words, alpha=2.0**-31)


def _normal_of_centred(centred: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert the results of `_centred`, which are overwritten, to standard normal numbers."""
    inverse = centred.erfinv_()
    if not _fuses_conversions(inverse):
        return inverse.mul_(math.sqrt(2)).to(dtype)
    return torch.mul(inverse, math.sqrt(2), out=torch.empty_like(inverse, dtype=dtype))


def _fuses_conversions(values: Tensor) -> bool:
    """Return True on a GPU outside torch.compile.

    There, mixed-type operations save a conversion kernel and give equal bits.
    """
    # the CPU takes four times as long, and torch.compile fuses all operations
    return values.device.type != "cpu" and not torch.compiler.is_compiling()


def derived_seed(seed: int, stream: str, step: int = 0) -> int:
    """Return a 63-bit seed for a stream at a step: the first bytes of SHA-256 of seed, stream and step."""
    digest = hashlib.sha256(f"{seed}/{stream}/{step}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1
