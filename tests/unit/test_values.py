"""Spellings of sizes and durations."""

from __future__ import annotations

import pytest

from sgl_krul.values import (
    Leaf,
    flag_leaf,
    format_duration,
    format_size,
    fraction_leaf,
    parse_duration,
    parse_size,
    path_leaf,
    read_size,
    text_leaf,
)


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("8GiB", 8 * 2**30),
        ("512MiB", 512 * 2**20),
        ("1.5 KiB", 1536),
        ("1GB", 10**9),
        ("10_000", 10_000),
        ("7B", 7),
        ("2TiB", 2 * 2**40),
        ("3KB", 3000),
        (1e9, 10**9),
        (0, 0),
    ],
)
def test_sizes(text: object, size_bytes: int) -> None:
    assert parse_size(text) == size_bytes


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("10m", 600.0),
        ("1h30m", 5400.0),
        ("20ms", 0.02),
        ("30d", 30 * 86400.0),
        ("1m500ms", 60.5),
        ("1.5s", 1.5),
        ("250us", 0.00025),
        ("30", 30.0),
        (30, 30.0),
        (0.02, 0.02),
    ],
)
def test_durations(text: object, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0B"),
        (1023, "1023B"),
        (1536, "1.5KiB"),
        (2**20 - 1, "1MiB"),
        (4 * 2**30, "4GiB"),
        (5000 * 2**50, "5000PiB"),
        (-1536, "-1.5KiB"),
    ],
)
def test_sizes_as_people_read_them(size_bytes: int, text: str) -> None:
    assert format_size(size_bytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0s"),
        (1e-9, "0s"),
        (0.00025, "250us"),
        (0.02, "20ms"),
        (0.99996, "1s"),
        (1.25, "1.2s"),
        (59.97, "1m"),
        (90, "1m30s"),
        (5400, "1h30m"),
        (3601, "1h"),
        (86400 * 30, "30d"),
        (86400 * 2 + 3600 * 3 + 59, "2d3h"),
        (-90, "-1m30s"),
    ],
)
def test_durations_as_people_read_them(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


def test_a_size_in_bounds() -> None:
    assert read_size("1KiB", at_least=1024) == 1024
    assert read_size(2**63 - 1, at_least=0) == 2**63 - 1
    for value in (1023, 2**63, 10**400):
        with pytest.raises(ValueError, match="out of range"):
            read_size(value, at_least=1024)


def test_a_number_too_long_for_a_float_is_no_duration() -> None:
    with pytest.raises(ValueError, match="out of range"):
        parse_duration(10**400)


ENVIRON = {"HOME": "/home/ada", "HOST": "h", "EMPTY": ""}


def read(leaf: dict[str, Leaf], value: object) -> object:
    return leaf["leaf"].read(value, ENVIRON)


@pytest.mark.parametrize("value", [1, 0.5, 1e-9, 1.0])
def test_fractions(value: float) -> None:
    fraction = read(fraction_leaf(), value)
    assert fraction == value
    assert type(fraction) is float


@pytest.mark.parametrize("value", [0, -1, 2, 1.0000001, float("nan"), float("-inf"), 10**400])
def test_fractions_out_of_range(value: float) -> None:
    with pytest.raises(ValueError, match="out of range"):
        read(fraction_leaf(), value)


def test_a_fraction_may_be_zero_where_that_is_said() -> None:
    assert [read(fraction_leaf(zero=True), value) for value in (0, 0.0, 0.5, 1)] == [0.0, 0.0, 0.5, 1.0]
    for value in (-0.1, 1.1, float("nan")):
        with pytest.raises(ValueError, match="out of range"):
            read(fraction_leaf(zero=True), value)


@pytest.mark.parametrize("value", ["true", 1, 0, None, "yes"])
def test_flags(value: object) -> None:
    assert [read(flag_leaf(), flag) for flag in (True, False)] == [True, False]
    with pytest.raises(ValueError, match="not one of them"):
        read(flag_leaf(), value)


@pytest.mark.parametrize(
    ("value", "expected"), [("a", "a"), ("$HOST:1", "h:1"), ("${HOST}s", "hs"), ("a$$b", "a$b"), (" ", " ")]
)
def test_texts(value: str, expected: str) -> None:
    assert read(text_leaf("a text"), value) == expected


@pytest.mark.parametrize("value", ["", "$EMPTY"])
def test_empty_texts(value: str) -> None:
    assert read(text_leaf("a text", empty=True), value) == ""
    with pytest.raises(ValueError, match="empty"):
        read(text_leaf("a text", optional=True), value)


def test_null_only_where_it_may_be() -> None:
    assert read(text_leaf("a text", optional=True), None) is None
    assert read(path_leaf(optional=True), None) is None
    with pytest.raises(ValueError, match="not a text"):
        read(text_leaf("a text", empty=True), None)
    with pytest.raises(ValueError, match="not a path"):
        read(path_leaf(), None)


def test_a_variable_that_is_not_set_is_named_unless_it_may_be_a_secret() -> None:
    with pytest.raises(ValueError, match="the environment variable s3cret is not set"):
        read(text_leaf("a text"), "a$s3cret")
    with pytest.raises(
        ValueError, match=r"^a \$VARIABLE in it is not set; a dollar sign itself is written \$\$$"
    ):
        read(text_leaf("a text", secret=True), "a$s3cret")
