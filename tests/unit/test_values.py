"""Spellings of sizes and durations."""

from __future__ import annotations

import pytest

from sgl_krul.values import format_duration, format_size, parse_duration, parse_size


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
