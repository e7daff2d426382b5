"""Transforms in the registers of threads, and the exchange between two of them.

    X_k = sum_n x_n e^(sign 2 pi i n k / N)      N = A B,  n = a B + b,  k = ka + A kb
        = sum_b e^(sign 2 pi i b kb / B)  e^(sign 2 pi i b ka / N)  sum_a x_(aB+b) e^(sign 2 pi i a ka / A)

A row of numbers is a tuple: of A tensors [B, E], with one or a few elements in a thread, for E transforms at
once. So a thread has all numbers of a transform over a, and constants of which the compiler knows which are 0
or 1. Between the two transforms (Cooley and Tukey 1965) come the twiddle factors, powers of one number a
thread, and one trip through shared memory, after which the tuple is of B tensors [A, E]. With N = A B D the
transform over b is itself split into two in this way, with another exchange.

Triton 3.6 searches a whole kernel for each of its loads and stores: tuples are short, or it would compile for
minutes."""
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

import math

import triton
import triton.language as tl


@triton.constexpr_function
def cosine(k: int, n: int) -> float:
    """Of k of n parts of a full turn."""
    return math.cos(2.0 * math.pi * k / n)


@triton.constexpr_function
def sine(k: int, n: int) -> float:
    """Of k of n parts of a full turn."""
    return math.sin(2.0 * math.pi * k / n)


@triton.constexpr_function
def log2(n: int) -> int:
    """Of a power of two."""
    return n.bit_length() - 1


@triton.jit
def longer(row, x):
    """A tuple with one more tensor."""
    return row + (x,)  # noqa: RUF005 (Triton knows no other way)


@triton.jit
def times(re, im, other_re, other_im):
    """A complex product."""
    return re * other_re - im * other_im, re * other_im + im * other_re


@triton.jit
def fft(re, im, N: tl.constexpr, SIGN: tl.constexpr):
    """The transform of tuples of N tensors, in order."""
    if N == 1:
        return re, im
    else:
        even_re, even_im = fft(_every_other(re, 0, N), _every_other(im, 0, N), N // 2, SIGN)
        odd_re, odd_im = fft(_every_other(re, 1, N), _every_other(im, 1, N), N // 2, SIGN)
        low_re, low_im, high_re, high_im = (), (), (), ()
        for k in tl.static_range(N // 2):
            turned_re, turned_im = _turned(odd_re[k], odd_im[k], k, N, SIGN)
            low_re = longer(low_re, even_re[k] + turned_re)
            low_im = longer(low_im, even_im[k] + turned_im)
            high_re = longer(high_re, even_re[k] - turned_re)
            high_im = longer(high_im, even_im[k] - turned_im)
        return low_re + high_re, low_im + high_im


@triton.jit
def _every_other(row, FIRST: tl.constexpr, N: tl.constexpr):
    found = ()
    for i in tl.static_range(FIRST, N, 2):
        found = longer(found, row[i])
    return found


@triton.jit
def _turned(re, im, K: tl.constexpr, N: tl.constexpr, SIGN: tl.constexpr):
    """Times e^(SIGN 2 pi i K / N), for K < N / 2."""
    if K == 0:
        return re, im
    elif 4 * K == N:
        return -SIGN * im, SIGN * re
    else:
        return times(re, im, cosine(K, N), SIGN * sine(K, N))


@triton.jit
def multiplied(re, im, factors_re, factors_im, N: tl.constexpr):
    """N numbers times N factors."""
    new_re, new_im = (), ()
    for i in tl.static_range(N):
        x, y = times(re[i], im[i], factors_re[i], factors_im[i])
        new_re, new_im = longer(new_re, x), longer(new_im, y)
    return new_re, new_im


@triton.jit
def powers(re, im, steps_re, steps_im, N: tl.constexpr):
    """A complex number times the powers 0 .. N - 1 of another, of which `steps` are the powers 1, 2, 4 and so
    on: no product is of more than log2 N others."""
    if N == 1:
        return (re,), (im,)
    else:
        HALF: tl.constexpr = N // 2
        low_re, low_im = powers(re, im, steps_re, steps_im, HALF)
        high_re, high_im = (), ()
        for i in tl.static_range(HALF):
            x, y = times(low_re[i], low_im[i], steps_re[log2(HALF)], steps_im[log2(HALF)])
            high_re, high_im = longer(high_re, x), longer(high_im, y)
        return low_re + high_re, low_im + high_im


@triton.jit
def factors_at(table_ptr, index, lane, LANES: tl.constexpr):
    """What the factors of each index begin with and go on with, (re, im, step re, step im) of a table
    [indices, 4, LANES]. All lanes have the same numbers, so that they are read as all else is: by threads
    beside each other what lies side by side, and in the same layout."""
    at = table_ptr + 4 * LANES * index + lane
    return tl.load(at), tl.load(at + LANES), tl.load(at + 2 * LANES), tl.load(at + 3 * LANES)


@triton.jit
def stepped(re, im, factors, N: tl.constexpr):
    """N numbers times N factors, made here of what `factors_at` gave: they would fill a thread's registers
    if it kept them."""
    steps_re, steps_im = (factors[2],), (factors[3],)
    for i in tl.static_range(log2(N) - 1):
        x, y = times(steps_re[i], steps_im[i], steps_re[i], steps_im[i])
        steps_re, steps_im = longer(steps_re, x), longer(steps_im, y)
    factors_re, factors_im = powers(factors[0], factors[1], steps_re, steps_im, N)
    return multiplied(re, im, factors_re, factors_im, N)


@triton.jit
def exchanged(re, im, A: tl.constexpr, B: tl.constexpr):
    """A tensors [B, E] as B tensors [A, E]: the place in the tuple and the first index for each other. re and
    im go together, with half as many barriers."""
    both = tl.permute(tl.join(_together(re, A), _together(im, A)), (2, 1, 3, 0))
    # Split by re and im last: split before, each would go through memory separately.
    row = _apart(tl.reshape(both, (both.shape[0], both.shape[1], 2 * B)), 2 * B)
    re, im = (), ()
    for i in tl.static_range(B):
        re, im = longer(re, row[i]), longer(im, row[B + i])
    return re, im


@triton.jit
def _together(row, N: tl.constexpr):
    """N tensors [B, E] as one [B, E, N]."""
    if N == 2:
        return tl.join(row[0], row[1])
    else:
        even = _together(_every_other(row, 0, N), N // 2)
        both = tl.join(even, _together(_every_other(row, 1, N), N // 2))
        return tl.reshape(both, (both.shape[0], both.shape[1], N))


@triton.jit
def _apart(x, N: tl.constexpr):
    """[A, E, N] as N tensors [A, E]."""
    if N == 1:
        return (tl.reshape(x, (x.shape[0], x.shape[1])),)
    else:
        even, odd = tl.split(tl.reshape(x, (x.shape[0], x.shape[1], N // 2, 2)))
        even, odd = _apart(even, N // 2), _apart(odd, N // 2)
        row = ()
        for i in tl.static_range(N // 2):
            row = longer(longer(row, even[i]), odd[i])
        return row


@triton.jit
def forward(re, im, outer, inner, A: tl.constexpr, B: tl.constexpr, D: tl.constexpr):
    """The transform of order A B D (sign -1): of A tensors [B, D E] to, with D = 1, B tensors [A, E], k = ka
    + A kb; else to D tensors [B, A E], k = ka + A (kb + B kd). outer: A factors, of each (b, d) to the power
    ka; inner: B factors, of each d to the power kb. Where these are not those above, what they are times them
    is taken along."""
    re, im = fft(re, im, A, -1)
    re, im = stepped(re, im, outer, A)
    re, im = exchanged(re, im, A, B)
    re, im = fft(re, im, B, -1)
    if D > 1:
        re, im = _inner_first(re, A, D, B), _inner_first(im, A, D, B)
        re, im = stepped(re, im, inner, B)
        re, im = exchanged(re, im, B, D)
        re, im = fft(re, im, D, -1)
    return re, im


@triton.jit
def backward(re, im, outer, inner, A: tl.constexpr, B: tl.constexpr, D: tl.constexpr):
    """What `forward` does, back again but for a factor A B D, by the conjugates of its factors."""
    if D > 1:
        re, im = fft(re, im, D, 1)
        re, im = exchanged(re, im, D, B)
        re, im = stepped(re, im, inner, B)
        re, im = _inner_first(re, D, A, B), _inner_first(im, D, A, B)
    re, im = fft(re, im, B, 1)
    re, im = exchanged(re, im, B, A)
    re, im = stepped(re, im, outer, A)
    return fft(re, im, A, 1)


@triton.jit
def _inner_first(row, A: tl.constexpr, D: tl.constexpr, N: tl.constexpr):
    """N tensors [A, D E] as [D, A E]."""
    turned = ()
    for i in tl.static_range(N):
        x = tl.permute(tl.reshape(row[i], (A, D, row[i].shape[1] // D)), (1, 0, 2))
        turned = longer(turned, tl.reshape(x, (D, A * x.shape[2])))
    return turned
