"""The SSD tier against raw sequential reads and writes of the same bytes, at the same alignment.

Writing: both sides count until everything is durable, file names too. The tier as a pause uses it (12 chunks
and the manifest, fsync "commit": at the manifest all of them are fsynced, then their directories); the
baseline one file, a pwritev a chunk, one fsync of the file and one of its directory. New files every time.

Reading: the tier as a resume uses it, by one thread (header, then all segments, into buffers like those of
the arena); the baseline preadv after preadv of about 1 MiB into the same buffers, which is quicker here than
larger ones. "cold": the files of both are clean and put
out of the page cache by posix_fadvise(DONTNEED) before each timed read, so both come from the device. "warm":
both from the page cache.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.compare import Comparison, compare
from benchmarks.harness import resident_share
from benchmarks.sample import Names, Sample
from sgl_krul.store import SsdTier
from sgl_krul.store.object_file import ALIGNMENT, head_bytes

__all__ = ["SsdResult", "measure_ssd"]

_READ_VIEWS = 3  # segments in one preadv of the baseline


@dataclass
class SsdResult:
    """`cold_resident`: the largest share of the files in the page cache before a cold read."""

    write: Comparison
    cold: Comparison
    warm: Comparison
    cold_resident: float


def measure_ssd(place: Path, sample: Sample, rounds: int) -> SsdResult:
    """Writes (rounds + 1) times twice the sample below `place`."""
    tier = SsdTier(place / "tier", capacity_bytes=1 << 50, free_space_floor_bytes=1 << 30, fsync="commit")
    with tier:
        raw = _Raw(place / "raw", sample)
        write = compare(
            raw.size_bytes,
            lambda number: _put(tier, sample, number),
            raw.write,
            rounds=rounds,
        )
        disk = _Files(place, raw, sample.chunks)
        cold = compare(
            sample.size_bytes,
            lambda number: _read(tier, sample, number),
            raw.read,
            rounds=rounds,
            before=disk.drop,
        )
        sample.require_read()
        warm = compare(
            sample.size_bytes,
            lambda number: _read(tier, sample, 0),
            lambda number: raw.read(0),
            rounds=rounds,
        )
        sample.require_read()
    return SsdResult(write, cold, warm, max(disk.resident))


def _put(tier: SsdTier, sample: Sample, number: int) -> None:
    names = Names(number, sample.chunks)
    for index, segments in enumerate(sample.sources):
        tier.put(names.chunk_key(index), sample.headers[index], segments)
    tier.put(names.manifest_key, sample.manifest, [])


def _read(tier: SsdTier, sample: Sample, number: int) -> None:
    names = Names(number, sample.chunks)
    for index, into in enumerate(sample.targets):
        tier.read_header(names.chunk_key(index))
        tier.read_segments(names.chunk_key(index), 0, into)


class _Raw:
    """Session after session, each one file with just the bytes of the tier's files one after another."""

    def __init__(self, directory: Path, sample: Sample) -> None:
        directory.mkdir()
        self._directory = directory
        self._targets = sample.targets
        body = sample.size_bytes // sample.chunks
        self._chunks = [
            [memoryview(head_bytes(header, body)), *segments]
            for header, segments in zip(sample.headers, sample.sources, strict=True)
        ]
        self._manifest = head_bytes(sample.manifest, 0)
        self._head = bytearray(ALIGNMENT)
        heads = sum(views[0].nbytes for views in self._chunks)
        self.size_bytes = sample.size_bytes + heads + len(self._manifest)

    def path(self, number: int) -> Path:
        """The file of session `number`."""
        return self._directory / str(number)

    def write(self, number: int) -> None:
        """pwritev chunk by chunk, then fsync of the file and of its directory."""
        fd = os.open(self.path(number), os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        offset = 0
        for views in (*self._chunks, [memoryview(self._manifest)]):
            offset += _whole(os.pwritev(fd, views, offset), sum(view.nbytes for view in views))
        os.fsync(fd)
        os.close(fd)
        directory = os.open(self._directory, os.O_RDONLY | os.O_DIRECTORY)
        os.fsync(directory)
        os.close(directory)

    def read(self, number: int) -> None:
        """preadv after preadv, the next one where the last one ended."""
        fd = os.open(self.path(number), os.O_RDONLY)
        offset = 0
        for targets in self._targets:
            views = [memoryview(self._head), *targets]
            for first in range(0, len(views), _READ_VIEWS):
                some = views[first : first + _READ_VIEWS]
                offset += _whole(os.preadv(fd, some, offset), sum(view.nbytes for view in some))
        os.close(fd)


def _whole(done: int, size: int) -> int:
    if done != size:
        raise RuntimeError(f"{done} of {size} bytes: this file system cuts large calls short")
    return done


@dataclass
class _Files:
    """Puts the files of a session, the tier's and the raw one, out of the page cache."""

    place: Path
    raw: _Raw
    chunks: int
    resident: list[float] = field(default_factory=list)

    def drop(self, number: int) -> None:
        """They are clean already: both sides were fsynced."""
        names = Names(number, self.chunks)
        paths = [self.place / "tier" / names.chunk_key(index) for index in range(self.chunks)]
        paths.append(self.raw.path(number))
        for path in paths:
            fd = os.open(path, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)
        self.resident.append(resident_share(paths))
