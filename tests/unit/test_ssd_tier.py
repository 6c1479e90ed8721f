"""The SSD tier on real files: the format, full and read-only disks, crashes, locks, fsync."""

from __future__ import annotations

import itertools
import os
import random
import resource
import shutil
import signal
import struct
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import pytest
import xxhash

from sgl_krul.errors import ConfigError, Corrupt, Missing, StoreFull, StoreUnavailable
from sgl_krul.store import Entry, SsdTier
from sgl_krul.store.index import ObjectIndex
from sgl_krul.store.object_file import read_at, write_all
from sgl_krul.store.tier import MAX_HEADER_BYTES

PROJECT = Path(__file__).parents[2]


def open_tier(root: Path, **changes: object) -> SsdTier:
    settings: dict[str, object] = {
        "capacity_bytes": 1 << 30,
        "free_space_floor_bytes": 0,
        "fsync": "never",
        "lock_wait_s": 0.0,
    }
    return SsdTier(root, **{**settings, **changes})  # type: ignore[arg-type]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "deep" / "root"


@pytest.fixture
def tier(root: Path) -> Iterator[SsdTier]:
    with open_tier(root) as tier:
        yield tier
        assert tier.check() == []


@contextmanager
def mounted(path: Path, size: str = "1m") -> Iterator[Path]:
    """A small tmpfs: a disk that can be filled. It takes the right to mount."""
    path.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(path)], check=True)
    try:
        yield path
    finally:
        subprocess.run(["umount", str(path)], check=True)


@contextmanager
def read_only(path: Path) -> Iterator[None]:
    subprocess.run(["mount", "-o", "remount,ro", str(path)], check=True)
    try:
        yield
    finally:
        subprocess.run(["mount", "-o", "remount,rw", str(path)], check=True)


def files_below(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.name != ".lock")


def read(tier: SsdTier, key: str, size: int) -> bytes:
    buffer = bytearray(size)
    tier.read_segments(key, 0, [memoryview(buffer)])
    return bytes(buffer)


# -- format --


def test_the_file_is_as_documented(tier: SsdTier, root: Path) -> None:
    header = b"h" * 5000
    assert tier.put("a/b", header, [b"one", b"", b"two"]) == 2 * 4096 + 6
    data = (root / "a/b").read_bytes()
    fields = struct.pack("<8sIIQ", b"KRULOBJ\0", 1, 5000, 6)
    checksum = struct.pack("<Q", xxhash.xxh3_64_intdigest(fields + header))
    assert data == (fields + checksum + header).ljust(2 * 4096, b"\0") + b"onetwo"
    assert (root / "a/b").stat().st_mode & 0o777 == 0o600
    assert (root / "a").stat().st_mode & 0o777 == 0o700


def test_objects_outlive_the_tier(root: Path) -> None:
    with open_tier(root) as tier:
        stored = tier.put("a/b", b"h", [b"body"])
        entries = list(tier.scan(""))
    with open_tier(root) as again:
        assert list(again.scan("")) == entries
        assert again.usage()[:2] == (stored, 1)
        assert read(again, "a/b", 4) == b"body"
        assert again.check() == []


def test_every_flipped_bit_of_the_head_is_found(tier: SsdTier, root: Path) -> None:
    header = bytes(range(40))
    tier.put("key", header, [b"body"])
    good = (root / "key").read_bytes()
    for bit in range(8 * (32 + len(header))):
        bad = bytearray(good)
        bad[bit // 8] ^= 1 << bit % 8
        (root / "key").write_bytes(bad)
        with pytest.raises(Corrupt) as caught:
            tier.read_header("key")
        assert caught.value.reason in {"version", "length", "checksum"}
        with pytest.raises(Corrupt):
            read(tier, "key", 4)
    assert len(tier.check()) == 2  # another time, another checksum
    tier.put("key", header, [b"body"])


@pytest.mark.parametrize("length", [0, 1, 7, 8, 31, 32, 100, 4095, 4096, 9000, 9190, 9193])
def test_a_file_of_another_length_is_corrupt(tier: SsdTier, root: Path, length: int) -> None:
    tier.put("key", b"h" * 5000, [b"b" * 1000])
    good = (root / "key").read_bytes()
    (root / "key").write_bytes(good[:length].ljust(length, b"\0"))
    with pytest.raises(Corrupt) as caught:
        tier.read_header("key")
    assert caught.value.reason == "length"
    with pytest.raises(Corrupt):
        read(tier, "key", 1000)
    assert tier.delete("key") is True


def test_a_header_length_out_of_bounds_is_not_believed(tier: SsdTier, root: Path) -> None:
    for length in (MAX_HEADER_BYTES + 1, 0xFFFFFFFF):
        fields = struct.pack("<8sIIQ", b"KRULOBJ\0", 1, length, 0)
        checksum = struct.pack("<Q", xxhash.xxh3_64_intdigest(fields))
        with (root / "key").open("wb") as file:
            file.write(fields + checksum)
            file.truncate(-(-(length + 32) // 4096) * 4096)  # a hole: takes no space
        with pytest.raises(Corrupt, match="length"):
            tier.read_header("key")
        os.unlink(root / "key")


def test_foreign_files_are_left_alone(root: Path) -> None:
    (root / "lost+found").mkdir(parents=True)
    (root / "README").write_text("mine")
    (root / "link").symlink_to(root / "README")
    os.mkfifo(root / "pipe")
    with open_tier(root) as tier:
        assert list(tier.scan("")) == []
        with pytest.raises(StoreUnavailable, match="ELOOP"):
            tier.read_header("link")
        with pytest.raises(Corrupt, match="not a regular file"):
            tier.read_header("pipe")
        assert tier.check() == []
    assert files_below(root) == ["README", "link", "lost+found", "pipe"]


def test_deletes_take_empty_directories_along(tier: SsdTier, root: Path) -> None:
    tier.put("ns/s1/0/1", b"", [])
    tier.put("ns/s1/manifest", b"", [])
    tier.put("ns/s2/manifest", b"", [])
    tier.delete("ns/s1/0/1")
    assert files_below(root) == ["ns", "ns/s1", "ns/s1/manifest", "ns/s2", "ns/s2/manifest"]
    tier.delete("ns/s1/manifest")
    assert files_below(root) == ["ns", "ns/s2", "ns/s2/manifest"]
    tier.delete("ns/s2/manifest")
    assert files_below(root) == []
    assert root.is_dir()


def test_a_file_removed_by_another_hand_is_a_miss(tier: SsdTier, root: Path) -> None:
    tier.put("a/b", b"h", [b"body"])
    (root / "a/b").unlink()
    assert tier.check() != []
    with pytest.raises(Missing, match="a/b"):
        read(tier, "a/b", 4)
    assert tier.usage()[:2] == (0, 0)


# -- many buffers, short reads and writes --


def test_more_buffers_than_one_call_takes(tier: SsdTier) -> None:
    rng = random.Random(1)
    parts = [rng.randbytes(rng.randrange(9)) for _ in range(5000)]
    body = b"".join(parts)
    tier.put("key", b"h", parts)
    buffers = [bytearray(len(part)) for part in parts]
    tier.read_segments("key", 0, [memoryview(buffer) for buffer in buffers])
    assert b"".join(buffers) == body
    ragged = [bytearray(rng.randrange(5)) for _ in range(3000)]
    tier.read_segments("key", 11, [memoryview(buffer) for buffer in ragged])
    joined = b"".join(ragged)
    assert joined == body[11 : 11 + len(joined)]


def test_short_writes_go_on() -> None:
    """Signals cut writes to a pipe short: all buffers still go through, in order."""
    rng = random.Random(2)
    parts = [rng.randbytes(rng.randrange(3000)) for _ in range(2500)]
    source, sink = os.pipe()
    received = bytearray()
    signals: list[int] = []
    writer = threading.get_ident()

    def drain() -> None:
        while chunk := os.read(source, 7777):
            received.extend(chunk)
            if len(received) < 2_000_000:
                signal.pthread_kill(writer, signal.SIGUSR1)

    previous = signal.signal(signal.SIGUSR1, lambda number, frame: signals.append(number))
    thread = threading.Thread(target=drain)
    thread.start()
    try:
        write_all(sink, [memoryview(part) for part in parts])
    finally:
        os.close(sink)
        thread.join(10)
        os.close(source)
        signal.signal(signal.SIGUSR1, previous)
    assert bytes(received) == b"".join(parts)
    assert len(signals) > 3


def test_short_reads_go_on(tmp_path: Path) -> None:
    """One call reads less than 2 GiB: asked for more, the rest comes all the same."""
    size = 64 << 20
    with mounted(tmp_path / "disk") as disk:  # a tmpfs: reading a hole fills no cache
        with (disk / "hole").open("wb") as file:
            file.truncate(33 * size)
            file.seek(33 * size - 3)
            file.write(b"end")
        last = bytearray(b"x" * size)
        fd = os.open(disk / "hole", os.O_RDONLY)
        try:
            assert os.preadv(fd, [memoryview(last)] * 33, 0) < 33 * size
            read_at(fd, [memoryview(bytearray(size))] * 32 + [memoryview(last)], 0, "hole")
            assert last == bytes(size - 3) + b"end"
            with pytest.raises(Corrupt, match=f"ends at byte {33 * size}"):
                read_at(fd, [memoryview(last)], 33 * size - 1, "hole")
        finally:
            os.close(fd)


# -- full and read-only places --


def test_a_full_disk_changes_nothing(tmp_path: Path) -> None:
    old = random.Random(3).randbytes(300_000)
    with mounted(tmp_path / "disk") as disk, open_tier(disk / "root") as tier:
        tier.put("a/old", b"h", [old])
        before = files_below(disk / "root")
        for key in ("a/old", "b/new", "new"):
            with pytest.raises(StoreFull, match="ENOSPC"):
                tier.put(key, b"h", [bytes(100_000)] * 9)
        assert files_below(disk / "root") == before
        assert read(tier, "a/old", len(old)) == old
        assert tier.check() == []
        tier.put("a/old", b"h", [bytes(500_000)])  # there is room again
        assert tier.check() == []


def test_a_disk_without_room_for_names(tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", "1m,nr_inodes=5") as disk, open_tier(disk / "root") as tier:
        with pytest.raises(StoreFull, match="ENOSPC"):
            tier.put("a/b/c/d", b"h", [b"body"])
        assert files_below(disk / "root") == []
        tier.put("a", b"h", [b"body"])
        assert tier.check() == []


def test_a_full_disk_can_still_be_opened_and_read(tmp_path: Path) -> None:
    with mounted(tmp_path / "disk") as disk:
        with open_tier(disk / "root") as tier:
            tier.put("key", b"h", [b"body"])
        (disk / "root/.lock").write_bytes(b"")
        (disk / "filler").write_bytes(bytes(1024 * 1024 - 3 * 4096))
        with open_tier(disk / "root") as tier:
            assert read(tier, "key", 4) == b"body"
            assert tier.delete("key") is True


def test_the_free_space_floor_is_kept(tmp_path: Path) -> None:
    with mounted(tmp_path / "disk") as disk, open_tier(disk, free_space_floor_bytes=600_000) as tier:
        tier.put("fits", b"h", [bytes(300_000)])
        with pytest.raises(StoreFull, match="floor"):
            tier.put("more", b"h", [bytes(200_000)])
        assert files_below(disk) == ["fits"]
        assert tier.check() == []


def test_the_cap_counts_heads_and_what_is_replaced(root: Path) -> None:
    with open_tier(root, capacity_bytes=3 * 4096) as tier:
        tier.put("a", b"", [bytes(4096)])
        with pytest.raises(StoreFull, match=r"8192 bytes on top of 8192 pass the cap of 12288"):
            tier.put("a", b"", [bytes(4096)])
        tier.put("b", b"", [])
        with pytest.raises(StoreFull):
            tier.put("c", b"", [])
        tier.delete("a")
        tier.put("c", b"", [])
        assert tier.usage() == (8192, 2, 12288)
        assert tier.check() == []


def test_a_file_size_limit_is_unavailable(root: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with open_tier(root) as tier:
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))
            with pytest.raises(StoreUnavailable, match="EFBIG"):
                tier.put("a/b", b"h", [bytes(40_000)] * 2)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert files_below(root) == []
        assert tier.check() == []


def test_a_root_on_a_read_only_disk_is_unavailable(tmp_path: Path) -> None:
    with mounted(tmp_path / "disk") as disk:
        with open_tier(disk / "root") as tier:
            tier.put("a/b", b"h", [b"body"])
        with read_only(disk):
            with pytest.raises(StoreUnavailable, match=r"root/\.lock: .*EROFS"):
                open_tier(disk / "root")
            with pytest.raises(StoreUnavailable, match=r"other: .*EROFS"):
                open_tier(disk / "other")


def test_a_disk_that_turns_read_only_can_be_read(tier: SsdTier, root: Path) -> None:
    """The mount is below the root: the lock file, open for writing, would keep it from turning read-only."""
    with mounted(root / "disk"):
        tier.put("disk/a", b"h", [b"body"])
        with read_only(root / "disk"):
            for call in (
                lambda: tier.put("disk/a", b"new", [b"new"]),
                lambda: tier.put("disk/b/c", b"h", [b"body"]),
                lambda: tier.delete("disk/a"),
            ):
                with pytest.raises(StoreUnavailable, match=r"disk/.*EROFS"):
                    call()
            assert read(tier, "disk/a", 4) == b"body"
            assert tier.check() == []
        assert tier.delete("disk/a") is True  # the directory stays: something is mounted on it
        assert tier.check() == []


def test_a_place_below_a_file_is_unavailable(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no directory")
    with pytest.raises(StoreUnavailable, match=r"file/root: .*ENOTDIR"):
        open_tier(tmp_path / "file" / "root")


def test_a_key_below_an_object_or_over_a_directory_is_unavailable(tier: SsdTier, root: Path) -> None:
    tier.put("a", b"h", [b"body"])
    with pytest.raises(StoreUnavailable, match=r"a/b: .*ENOTDIR"):
        tier.put("a/b", b"h", [])
    tier.put("d/e", b"h", [])
    with pytest.raises(StoreUnavailable, match=r"d: .*EISDIR"):
        tier.put("d", b"h", [])
    assert files_below(root) == ["a", "d", "d/e"]


def test_settings_out_of_range(root: Path) -> None:
    for changes in (
        {"capacity_bytes": 0},
        {"free_space_floor_bytes": -1},
        {"fsync": "sometimes"},
        {"daily_write_bytes": -1},
    ):
        with pytest.raises(ConfigError, match=next(iter(changes))):
            open_tier(root, **changes)
    assert not root.exists()


# -- one server a root --


def child(code: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments], cwd=PROJECT, stdout=subprocess.PIPE, text=True
    )


HOLD = """
import sys, time
from pathlib import Path
from sgl_krul.store import SsdTier
tier = SsdTier(Path(sys.argv[1]), capacity_bytes=1 << 20, free_space_floor_bytes=0, fsync="never")
print("held", flush=True)
time.sleep(60)
"""


def test_a_second_server_is_refused_until_the_first_is_gone(root: Path) -> None:
    with child(HOLD, str(root)) as holder:
        try:
            assert holder.stdout is not None
            assert holder.stdout.readline() == "held\n"
            with pytest.raises(
                StoreUnavailable,
                match=rf"root: in use by another server \(pid {holder.pid}\); stop it, .* another ssd\.path",
            ):
                open_tier(root, lock_wait_s=0.2)
            threading.Timer(0.3, holder.kill).start()
            with open_tier(root, lock_wait_s=5.0) as tier:
                assert tier.check() == []
        finally:
            holder.kill()
    assert holder.returncode == -signal.SIGKILL


def test_close_lets_the_lock_go_and_refuses_what_comes_later(root: Path) -> None:
    tier = open_tier(root)
    tier.put("a", b"h", [b"body"])
    with pytest.raises(StoreUnavailable, match=f"pid {os.getpid()}"):
        open_tier(root)
    tier.close()
    tier.close()
    for call in (
        lambda: tier.put("b", b"", []),
        lambda: tier.read_header("a"),
        lambda: tier.read_segments("a", 0, []),
        lambda: tier.delete("a"),
        tier.check,
    ):
        with pytest.raises(StoreUnavailable, match="closed"):
            call()
    with open_tier(root) as again:
        assert read(again, "a", 4) == b"body"


# -- a root that was removed --


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("fsync", ["always", "commit", "never"])
def test_a_removed_root_is_made_anew(root: Path, fsync: str) -> None:
    with open_tier(root, fsync=fsync) as tier:
        descriptors = open_descriptors()
        tier.put("n/s/one", b"h", [b"old"])
        tier.put("n/s/manifest", b"h", [b"old"])
        shutil.rmtree(root.parent)
        assert tier.put("n/s/two", b"h", [b"new"]) == 4096 + 3
        assert [entry.key for entry in tier.scan("")] == ["n/s/two"]
        assert tier.usage()[:2] == (4096 + 3, 1)
        assert tier.read_header("n/s/manifest") is None
        with pytest.raises(Missing):
            read(tier, "n/s/one", 3)
        assert tier.delete("n/s/one") is False
        assert read(tier, "n/s/two", 3) == b"new"
        assert (root / "n/s/two").stat().st_mode & 0o777 == 0o600
        assert tier.check() == []
        assert open_descriptors() == descriptors
        with pytest.raises(StoreUnavailable, match=f"pid {os.getpid()}"):
            open_tier(root)  # the new one is locked too
        tier.put("n/s/manifest", b"h", [])
        assert tier.check() == []
    with open_tier(root) as again:
        assert read(again, "n/s/two", 3) == b"new"


def test_reads_find_the_removed_root_too(root: Path) -> None:
    with open_tier(root) as tier:
        for key in ("a/1", "a/2"):
            tier.put(key, b"h", [b"old"])
        shutil.rmtree(root)
        assert tier.read_header("nothing") is None
        assert tier.usage().objects == 2  # that one was never there
        assert tier.read_header("a/1") is None
        assert tier.usage()[:2] == (0, 0)
        assert root.is_dir()
        shutil.rmtree(root)
        assert tier.check() == []
        tier.put("b", b"h", [])
        shutil.rmtree(root)
        assert tier.check() == []
        assert tier.usage()[:2] == (0, 0)


def test_a_root_that_another_hand_made_again_is_read(root: Path, tmp_path: Path) -> None:
    with open_tier(tmp_path / "backup") as backup:
        backup.put("saved", b"h", [b"body"])
    (tmp_path / "backup/.tmp-1-0-dead").touch()
    with open_tier(root) as tier:
        tier.put("gone", b"h", [b"body"])
        shutil.rmtree(root)
        (tmp_path / "backup").rename(root)
        assert tier.read_header("gone") is None
        assert read(tier, "saved", 4) == b"body"
        assert [entry.key for entry in tier.scan("")] == ["saved"]
        assert files_below(root) == ["saved"]
        assert tier.check() == []


def test_a_file_in_place_of_the_root_is_unavailable_until_it_goes(root: Path) -> None:
    with open_tier(root) as tier:
        tier.put("a", b"h", [b"body"])
        shutil.rmtree(root)
        root.touch(0o400)
        for call in (
            lambda: tier.put("b/c", b"h", []),
            lambda: tier.read_header("a"),
            lambda: read(tier, "a", 4),
            tier.check,
        ):
            with pytest.raises(StoreUnavailable, match=r"root: File exists \(EEXIST\)"):
                call()
        root.unlink()
        tier.put("b/c", b"h", [b"body"])
        assert tier.read_header("a") is None
        assert read(tier, "b/c", 4) == b"body"
        assert tier.check() == []


def test_a_root_that_another_server_took_meanwhile(root: Path) -> None:
    with open_tier(root) as tier:
        shutil.rmtree(root)
        with open_tier(root) as other:
            other.put("theirs", b"h", [b"body"])
            with pytest.raises(StoreUnavailable, match="in use by another server"):
                tier.put("a", b"h", [])
            assert files_below(root) == ["theirs"]
        tier.put("a", b"h", [])
        assert [entry.key for entry in tier.scan("")] == ["a", "theirs"]
        assert tier.check() == []


def test_a_root_that_was_moved_goes_on_there(root: Path, tmp_path: Path) -> None:
    """So it does when something is mounted over it: nothing is written to the wrong disk by mistake."""
    with open_tier(root) as tier:
        tier.put("a", b"h", [b"body"])
        root.rename(tmp_path / "moved")
        root.mkdir()
        tier.put("b", b"h", [b"body"])
        assert tier.read_header("nothing") is None
        assert read(tier, "a", 4) == b"body"
        assert tier.check() == []
        assert files_below(root) == []
    assert files_below(tmp_path / "moved") == ["a", "b"]


def test_the_budget_is_kept_when_the_root_is_made_anew(root: Path) -> None:
    settings = {"daily_write_bytes": 1000 * 4096, "now": lambda: 1.8e9}
    with open_tier(root, **settings) as tier:
        tier.put("a", b"h", [bytes(19 * 4096)])
        shutil.rmtree(root)
        tier.put("a", b"h", [])
        assert tier.write_left_bytes == 979 * 4096
        assert (root / ".writes").read_text().endswith(f" {21 * 4096} bytes\n")
    with open_tier(root, **settings) as tier:
        assert tier.write_left_bytes == 979 * 4096


def test_puts_under_way_survive_a_removed_root(root: Path) -> None:
    """Whatever fails while it is being removed fails cleanly, and all is well afterwards."""
    removed = threading.Event()
    finished = 0

    def write(tier: SsdTier, seed: int) -> int:
        rng = random.Random(seed)
        done = 0
        while not removed.is_set() or done < 20:
            key = f"s{rng.randrange(4)}/{seed}"
            try:
                tier.put(key, b"h", [bytes([seed]) * 50_000])
                done += 1
                assert read(tier, key, 50_000) == bytes([seed]) * 50_000
            except (StoreUnavailable, Missing):
                continue
        return done

    with open_tier(root) as tier, ThreadPoolExecutor(4) as pool:
        writers = [pool.submit(write, tier, seed) for seed in range(4)]
        try:
            for _ in range(20):
                shutil.rmtree(root, ignore_errors=True)  # somebody may just have made a file in it
        finally:
            removed.set()
        finished = sum(writer.result(30) for writer in writers)
        tier.read_header("s0/0")
        for entry in list(tier.scan("")):
            tier.read_header(entry.key)  # what went with a directory below the root is noticed by reading
        assert tier.check() == []
    assert finished >= 80


# -- index --


def test_the_index_keeps_what_a_dictionary_would() -> None:
    rng = random.Random(4)
    parts = ["a", "a.b", "ab", "b"]
    keys = ["/".join(rng.choices(parts, k=rng.randrange(1, 5))) for _ in range(60)]
    prefixes = ["", "/", "a", "a/", "a//", "a/a", "a.", "a/b/a/", "ab/a", "c", "c/", *keys]
    index, model = ObjectIndex("here", 1 << 30), dict[str, Entry]()
    for step in range(2000):
        key = rng.choice(keys)
        if rng.random() < 0.5:
            model[key] = Entry(key, rng.randrange(100), float(step))
            index.set(key, model[key])
        else:
            model.pop(key, None)
            index.set(key, None)
        assert index.has(key) == (key in model)
        prefix = rng.choice(prefixes)
        assert index.select(prefix) == sorted(model[name] for name in model if name.startswith(prefix))
        assert index.usage()[:2] == (sum(entry.bytes for entry in model.values()), len(model))
    assert index.problems(list(model.values())) == []
    assert len(index.problems([])) == len(model) > 0
    index.reset(sorted(model.values())[:2])
    assert index.select("") == sorted(model.values())[:2]


@pytest.mark.parametrize("chunks", [1, 12])
def test_the_index_is_small(chunks: int) -> None:
    """Bytes of memory an object, by chunks a session. It has only to be well under 1,000."""
    rng = random.Random(5)
    namespace = rng.randbytes(16).hex()
    sessions = [rng.randbytes(32).hex() for _ in range(50_000 // chunks)]
    index = ObjectIndex("here", 1 << 60)
    tracemalloc.start()
    try:
        for session in sessions:
            for chunk in range(chunks):
                key = f"v1/{namespace}/{session}/g00000001-c{chunk:06d}"
                index.set(key, Entry(key, rng.randrange(1 << 24), rng.random() * 2e9))
        filled = tracemalloc.get_traced_memory()[0]
        assert filled / index.usage().objects < 800
        for session in sessions:
            for entry in index.select(f"v1/{namespace}/{session}/"):
                index.set(entry.key, None)
        assert tracemalloc.get_traced_memory()[0] < filled / 20  # empty directories are forgotten
    finally:
        tracemalloc.stop()


# -- crashes --


PUT_FOREVER = """
import sys
from pathlib import Path
from sgl_krul.store import SsdTier
tier = SsdTier(Path(sys.argv[1]), capacity_bytes=1 << 30, free_space_floor_bytes=0, fsync=sys.argv[2])
print("ready", flush=True)
for version in range(1, 1 << 30):
    fill = bytes([version % 251]) * 160_000
    for key in ("s/0/0", "s/0/1", "s/manifest"):
        tier.put(key, version.to_bytes(8, "big"), [fill] * 25)
    if version % 3 == 0:
        tier.delete("s/0/1")
"""


@pytest.mark.parametrize("fsync", ["commit", "never"])
def test_a_killed_server_leaves_whole_objects(root: Path, fsync: str) -> None:
    rng = random.Random(f"kill {fsync}")
    temporaries = 0
    newest = 0
    for kills in itertools.count():
        if kills >= 6 and temporaries:
            break  # some kills came in the middle of a put
        assert kills < 60
        with child(PUT_FOREVER, str(root), fsync) as putter:
            assert putter.stdout is not None
            assert putter.stdout.readline() == "ready\n"
            time.sleep(rng.uniform(0.0, 0.1))
            putter.kill()
        temporaries += sum(".tmp-" in name for name in files_below(root))
        with open_tier(root, fsync=fsync) as tier:
            assert tier.check() == []
            assert not any(".tmp-" in name for name in files_below(root))
            for entry in tier.scan(""):
                header = tier.read_header(entry.key)
                assert header is not None
                version = int.from_bytes(header, "big")
                assert read(tier, entry.key, 4_000_000) == bytes([version % 251]) * 4_000_000
                newest = max(newest, version)
    assert newest > 1


def test_temporaries_of_the_dead_are_swept_those_of_the_living_not(tier: SsdTier, root: Path) -> None:
    (root / "a").mkdir()
    (root / "a/.tmp-1-0-dead").write_bytes(b"half")
    (root / ".tmp-1-1-dead").write_bytes(b"half")
    tier.put("b/c", b"h", [b"body"])
    assert tier.sweep_temporaries() == 2
    assert files_below(root) == ["b", "b/c"]
    done = threading.Event()

    def sweep() -> int:
        count = 0
        while not done.is_set():
            count += tier.sweep_temporaries()
        return count

    with ThreadPoolExecutor(1) as pool:
        swept = pool.submit(sweep)
        try:
            for _ in range(100):
                tier.put("b/d", b"h", [bytes(300_000)])
        finally:
            done.set()
        assert swept.result(10) == 0


# -- fsync --


@contextmanager
def recorded() -> Iterator[list[str]]:
    """Which files this thread fsyncs and renames meanwhile, in order."""
    steps: list[str] = []

    def record(frame: FrameType, event: str, called: object) -> None:
        if event == "c_call" and called is os.fsync:
            path = Path(os.readlink(f"/proc/self/fd/{frame.f_locals['fd']}"))
            steps.append(f"fsync {'temporary' if path.name.startswith('.tmp-') else path.name}")
        elif event == "c_call" and called is os.replace:
            steps.append(f"rename {frame.f_locals['key']}")

    sys.setprofile(record)
    try:
        yield steps
    finally:
        sys.setprofile(None)


def test_fsync_always_syncs_file_then_name(root: Path) -> None:
    with open_tier(root, fsync="always") as tier:
        with recorded() as steps:
            tier.put("n/s/one", b"h", [b"body"])
        assert steps == ["fsync temporary", "fsync n", "fsync root", "rename n/s/one", "fsync s"]
        with recorded() as steps:
            tier.put("n/s/one", b"h", [b"body"])
        assert steps == ["fsync temporary", "rename n/s/one", "fsync s"]
        with recorded() as steps:
            tier.delete("n/s/one")
        assert steps == ["fsync root"]


def test_fsync_commit_syncs_a_session_before_its_manifest(root: Path) -> None:
    with open_tier(root, fsync="commit") as tier:
        with recorded() as steps:
            for key in ("n/s/0/a", "n/s/0/b", "n/s/1/c", "n/s/1/gone", "n/t/0/d"):
                tier.put(key, b"h", [b"body"])
            tier.delete("n/s/1/gone")
        assert [step for step in steps if step.startswith("fsync")] == []
        with recorded() as steps:
            tier.put("n/s/manifest", b"h", [b"body"])
        files, names = (
            ["fsync a", "fsync b", "fsync c"],
            ["fsync 1", "fsync 0", "fsync s", "fsync n", "fsync root"],
        )
        assert steps == ["fsync temporary", *files, *names, "rename n/s/manifest", "fsync s"]
        with recorded() as steps:
            tier.put("n/s/manifest", b"h", [b"body"])
        assert steps == ["fsync temporary", "rename n/s/manifest", "fsync s"]
        with recorded() as steps:
            tier.put("n/t/manifest", b"h", [b"body"])
        assert "fsync d" in steps
        with recorded() as steps:
            tier.delete("n/s/manifest")
        assert steps == ["fsync s"]


def test_fsync_never_syncs_nothing(root: Path) -> None:
    with open_tier(root, fsync="never") as tier, recorded() as steps:
        tier.put("n/s/a", b"h", [b"body"])
        tier.put("n/s/manifest", b"h", [b"body"])
    assert steps == ["rename n/s/a", "rename n/s/manifest"]
