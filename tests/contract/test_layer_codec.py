"""What every lossy codec promises, run over each of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np
import pytest
from numpy.typing import NDArray

from sgl_krul.codec import CastCodec, GroupCodec, KvBlock, LayerCodec, Mode, PairCodec
from sgl_krul.codec.shared import MergedPair, RawSharing
from sgl_krul.errors import Corrupt
from sgl_krul.layout import KvLayout
from tests.blocks import DTYPES, block_of, layout_of, same

TOKENS = [1, 4, 41, 123]
SHAPES = [(2, 8, 8), (3, 10, 7), (2, 48, 40), (1, 1, 1)]  # heads, numbers of K, of V

Floats: TypeAlias = NDArray[np.float32]


class Subject(Protocol):
    """A codec as the suite sees it: two layers to one segment or two, and back."""

    mode: Mode

    def lengths(self, tokens: int) -> tuple[int | None, ...]: ...

    def encode(self, owner: KvBlock, partner: KvBlock) -> tuple[bytes, ...]: ...

    def decode(self, segments: Sequence[bytes], tokens: int, owner: KvBlock) -> tuple[KvBlock, ...]: ...

    def close(self, owner: KvBlock, partner: KvBlock, decoded: Sequence[KvBlock]) -> bool:
        """Whether what was decoded is as near as the codec promises."""
        ...


class Alone:
    """A LayerCodec without a base; of the two layers the first is coded.

    `error`: the largest one, from the span of the numbers and the largest of them. (test_quantized has the
    bounds of single groups.)
    """

    def __init__(self, codec: LayerCodec, error: Callable[[float, float], float]) -> None:
        self.codec, self.error = codec, error
        self.mode = codec.mode

    def lengths(self, tokens: int) -> tuple[int | None, ...]:
        return (self.codec.length(tokens),)

    def encode(self, owner: KvBlock, partner: KvBlock) -> tuple[bytes, ...]:
        return (self.codec.encode(owner, None),)

    def decode(self, segments: Sequence[bytes], tokens: int, owner: KvBlock) -> tuple[KvBlock, ...]:
        return (self.codec.decode(memoryview(segments[0]), tokens, None),)

    def close(self, owner: KvBlock, partner: KvBlock, decoded: Sequence[KvBlock]) -> bool:
        (read,) = decoded
        return all(
            np.abs(found - exact).max() <= self.error(float(np.ptp(exact)), float(np.abs(exact).max()))
            for found, exact in ((read.k, owner.k), (read.v, owner.v))
        )


class Against:
    """A LayerCodec with a base: the second layer is coded against the first."""

    def __init__(self, codec: LayerCodec) -> None:
        self.codec = codec
        self.mode = codec.mode

    def lengths(self, tokens: int) -> tuple[int | None, ...]:
        return (self.codec.length(tokens),)

    def encode(self, owner: KvBlock, partner: KvBlock) -> tuple[bytes, ...]:
        return (self.codec.encode(partner, owner),)

    def decode(self, segments: Sequence[bytes], tokens: int, owner: KvBlock) -> tuple[KvBlock, ...]:
        return (self.codec.decode(memoryview(segments[0]), tokens, owner),)

    def close(self, owner: KvBlock, partner: KvBlock, decoded: Sequence[KvBlock]) -> bool:
        return same(decoded[0], owner)


class Pair:
    """A PairCodec: both layers are coded together."""

    def __init__(self, codec: PairCodec) -> None:
        self.codec = codec
        self.mode = codec.mode

    def lengths(self, tokens: int) -> tuple[int | None, ...]:
        return None, None

    def encode(self, owner: KvBlock, partner: KvBlock) -> tuple[bytes, ...]:
        return self.codec.encode(owner, partner)

    def decode(self, segments: Sequence[bytes], tokens: int, owner: KvBlock) -> tuple[KvBlock, ...]:
        first, second = map(memoryview, segments)
        return self.codec.decode_owner(first, tokens), self.codec.decode_partner(second, first, tokens)

    def close(self, owner: KvBlock, partner: KvBlock, decoded: Sequence[KvBlock]) -> bool:
        """Every vector keeps its length, and turns no further than to where the other layer's was."""
        for one, other, read in ((owner, partner, decoded[0]), (partner, owner, decoded[1])):
            for x, y, found in zip(vectors(one), vectors(other), vectors(read), strict=True):
                if not np.allclose(lengths(found), lengths(x), rtol=1e-2, atol=1e-6):
                    return False
                if (cosine(found, x) < cosine(x, y) - 1e-2).any():
                    return False
        return True


def vectors(block: KvBlock) -> tuple[Floats, Floats]:
    return block.k.reshape(block.tokens, -1), block.v.reshape(block.tokens, -1)


def lengths(
    rows: Floats,
) -> Floats:
    return np.linalg.norm(rows, axis=1)


def cosine(x: Floats, y: Floats) -> Floats:
    return (x * y).sum(axis=1) / np.maximum(lengths(x) * lengths(y), 1e-30)


class Case(NamedTuple):
    """A codec of one layout."""

    layout: KvLayout
    subject: Subject


SUBJECTS = {
    "bf16": lambda layout: Alone(CastCodec(layout), lambda span, largest: largest * 2**-8),
    "int8": lambda layout: Alone(GroupCodec(layout, 8), lambda span, largest: (span + largest * 2**-9) / 510),
    "int4": lambda layout: Alone(GroupCodec(layout, 4), lambda span, largest: (span + largest * 2**-9) / 30),
    "shared-raw": lambda layout: Against(RawSharing()),
    "merged": lambda layout: Pair(MergedPair(layout)),
}


@pytest.fixture(params=list(SUBJECTS))
def name(request: pytest.FixtureRequest) -> str:
    """Each codec."""
    codec: str = request.param
    return codec


def case_of(name: str, dtype: str = "bfloat16", shape: tuple[int, int, int] = (3, 10, 7)) -> Case:
    layout = layout_of(dtype, heads=shape[0], k=shape[1], v=shape[2])
    return Case(layout, SUBJECTS[name](layout))


def two_layers(layout: KvLayout, tokens: int) -> tuple[KvBlock, KvBlock]:
    return block_of(layout, tokens, 1), block_of(layout, tokens, 2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("tokens", TOKENS)
def test_round_trip(name: str, dtype: str, shape: tuple[int, int, int], tokens: int) -> None:
    layout, subject = case_of(name, dtype, shape)
    owner, partner = two_layers(layout, tokens)
    segments = subject.encode(owner, partner)
    for segment, length in zip(segments, subject.lengths(tokens), strict=True):
        assert length is None or len(segment) == length
    decoded = subject.decode(segments, tokens, owner)
    for block in decoded:
        assert (block.k.shape, block.v.shape) == (owner.k.shape, owner.v.shape)
    assert subject.close(owner, partner, decoded)


def test_the_mode_is_one_of_a_coded_plan(name: str) -> None:
    assert case_of(name).subject.mode in (Mode.quantized, Mode.shared)


@pytest.mark.parametrize("tokens", TOKENS)
def test_the_same_numbers_give_the_same_bytes(name: str, tokens: int) -> None:
    """Twice, by another codec of the same layout, from arrays laid out otherwise; and no argument changes."""
    layout, subject = case_of(name)
    owner, partner = two_layers(layout, tokens)
    segments = subject.encode(owner, partner)
    turned = [KvBlock(np.asfortranarray(block.k), np.asfortranarray(block.v)) for block in (owner, partner)]
    assert subject.encode(owner, partner) == segments
    assert case_of(name).subject.encode(*turned) == segments
    assert all(map(same, (owner, partner), two_layers(layout, tokens)))
    kept = [bytes(segment) for segment in segments]
    first, second = subject.decode(segments, tokens, owner), subject.decode(segments, tokens, owner)
    assert all(map(same, first, second))
    assert kept == list(segments)


@pytest.mark.parametrize("tokens", [1, 41])
def test_another_length_is_corrupt(name: str, tokens: int) -> None:
    layout, subject = case_of(name)
    owner, partner = two_layers(layout, tokens)
    segments = subject.encode(owner, partner)
    for index, segment in enumerate(segments):
        wrong = [segment + b"\0", segment + segment + b"\0", segment[:-1], segment[: len(segment) // 2], b""]
        for data in {bytes(each) for each in wrong} - {bytes(segment)}:
            with pytest.raises(Corrupt) as caught:
                subject.decode([*segments[:index], data, *segments[index + 1 :]], tokens, owner)
            assert caught.value.reason == "length"


def test_another_number_of_tokens_is_corrupt(name: str) -> None:
    layout, subject = case_of(name)
    owner, partner = two_layers(layout, 41)
    segments = subject.encode(owner, partner)
    for tokens in (1, 40, 42, 64):
        if subject.lengths(tokens) == (0,):  # nothing is stored, whatever the tokens are
            continue
        with pytest.raises(Corrupt, match="length"):
            subject.decode(segments, tokens, block_of(layout, tokens))


@pytest.mark.parametrize("tokens", [1, 5, 41])
def test_any_bytes_are_corrupt_or_a_block(name: str, tokens: int) -> None:
    """Single flipped bits, and random bytes of the right length: no other error, and never another shape."""
    layout, subject = case_of(name)
    owner, partner = two_layers(layout, tokens)
    segments = subject.encode(owner, partner)
    rng = np.random.default_rng(tokens)
    for index, segment in enumerate(segments):
        damaged = [rng.bytes(len(segment)) for _ in range(20)]
        for bit in rng.permutation(8 * len(segment))[:300].tolist():
            flipped = bytearray(segment)
            flipped[bit // 8] ^= 1 << bit % 8
            damaged.append(bytes(flipped))
        for data in damaged:
            try:
                decoded = subject.decode([*segments[:index], data, *segments[index + 1 :]], tokens, owner)
            except Corrupt:
                continue
            for block in decoded:
                assert (block.k.shape, block.v.shape) == (owner.k.shape, owner.v.shape)


@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("where", ["k", "v"])
def test_what_is_no_number_is_refused_or_kept(name: str, number: float, which: int, where: str) -> None:
    layout, subject = case_of(name)
    layers = two_layers(layout, 41)
    getattr(layers[which], where)[17, 1, 3] = number
    try:
        segments = subject.encode(*layers)
    except ValueError:
        return
    decoded = subject.decode(segments, 41, layers[0])
    if which < len(decoded):
        found = getattr(decoded[which], where)[17, 1, 3]
        assert np.array_equal(found, number, equal_nan=True)
