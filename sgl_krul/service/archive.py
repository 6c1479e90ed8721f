"""One paused session in one file: export and import. The file's format is in `archive_file`.

Neither direction trusts what it reads: a chunk that a tier has damaged is not exported, and of a file that is
not whole nothing is imported.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path

import msgpack
import msgspec

from sgl_krul.errors import BadArchive, Corrupt, Missing, StoreUnavailable
from sgl_krul.restore.pipeline import count_own_chunks
from sgl_krul.service.archive_file import MAGIC, VERSION, ArchiveReader, ArchiveWriter, Kind
from sgl_krul.service.mover import Stopped, check_chunk, cut_text, leading, read_chunk
from sgl_krul.session.landing import Landing
from sgl_krul.session.record import (
    ChunkRef,
    Manifest,
    chunk_key,
    decode_manifest,
    encode_manifest,
    is_exact_chunk,
)
from sgl_krul.store.root import as_store_error
from sgl_krul.store.tier import Tier

__all__ = ["ArchiveReport", "export_session", "import_session", "read_archive_manifest"]

_DIGEST = re.compile(r"[0-9a-f]{64}")

Visit = Callable[[ChunkRef, bytes, Sequence[memoryview]], None]


@dataclass(frozen=True)
class ArchiveReport:
    """What an export wrote: `manifest` names the chunks that are in the file.

    `cut` says why the export ended early ("" when the whole session is there).
    """

    path: Path
    manifest: Manifest
    chunks: int
    bytes_written: int
    cut: str


# -- export --


def export_session(
    manifest: Manifest,
    sources: Sequence[Tier],
    path: Path,
    *,
    key: bytes,
    stopped: Callable[[], bool] = lambda: False,
) -> ArchiveReport:
    """Write the session of `manifest` to the file `path`, sealed with `key`.

    Each chunk is taken from the first of `sources` that has it intact; where none has, the export ends. The
    file is made beside `path` (readable by its owner only), and takes its place when complete and synced. At
    most one chunk is in memory at a time. Blocks on I/O: call it from a worker.

    Raises:
        Missing, Corrupt: no source has the first chunk.
        StoreUnavailable: a chunk may be in a source that cannot be read now, or the file cannot be written.
        StoreFull: no room for the file.
        BadArchive: `path` cannot be the name of a file.
        Stopped
        (In all these cases `path` is as before.)
    """
    if not sources:
        raise ValueError("sources: expected at least one tier; got none")
    with _naming(path), _replacing(path) as fd:
        out = ArchiveWriter(fd, key)
        out.frame(Kind.manifest, encode_manifest(manifest))
        count, cut = _export_chunks(manifest, sources, out, stopped)
        out.end(count)
    return ArchiveReport(path, leading(manifest, manifest.chunks[:count]), count, out.written, cut)


def _export_chunks(
    manifest: Manifest, sources: Sequence[Tier], out: ArchiveWriter, stopped: Callable[[], bool]
) -> tuple[int, str]:
    """Write the leading chunks that are to be had; returns how many, and why no more."""
    for count, ref in enumerate(manifest.chunks):
        if stopped():
            raise Stopped(
                f"exporting session {manifest.session_id!r} was stopped after {count} of "
                f"{len(manifest.chunks)} chunks: no file was written, try again later"
            )
        error = _export_chunk(sources, manifest.namespace, ref, out)
        if error is not None and count == 0:
            raise error
        if error is not None:
            return count, cut_text(error)
    return len(manifest.chunks), ""


def _export_chunk(
    sources: Sequence[Tier], namespace: str, ref: ChunkRef, out: ArchiveWriter
) -> Missing | Corrupt | None:
    """Write one chunk; what is wrong with it when no source has it intact. Its bytes go when this returns."""
    errors: list[Missing | Corrupt] = []
    unavailable: StoreUnavailable | None = None
    for source in sources:
        try:
            header, segments = read_chunk(source, namespace, ref)
        except (Missing, Corrupt) as error:
            errors.append(error.with_traceback(None))  # its frames hold the bytes that were read
        except StoreUnavailable as error:
            unavailable = error.with_traceback(None)
        else:
            out.frame(Kind.chunk, header)
            out.body(segments)
            return None
    if unavailable is not None:
        raise unavailable
    return next((error for error in errors if isinstance(error, Corrupt)), errors[0])


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """An OSError leaves as a StoreError that names `path`."""
    try:
        possible = b"\0" not in os.fsencode(path)
    except UnicodeEncodeError:
        possible = False
    if not possible:
        raise BadArchive(f"{str(path)!r} cannot be the name of a file: choose another")
    try:
        yield
    except OSError as error:
        raise as_store_error(error, path) from error


@contextmanager
def _replacing(path: Path) -> Iterator[int]:
    """A descriptor of a new file that takes the place of `path` when the `with` ends well, and else goes."""
    if path.is_dir():  # the rename would find out, at the very end
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    temporary = path.parent / f".krul-export-{secrets.token_hex(8)}"
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        try:
            yield fd
            os.fsync(fd)
        finally:
            os.close(fd)
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):  # the first error is the one to tell
            os.unlink(temporary)
        raise
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


# -- import --


def import_session(
    path: Path,
    target: Tier,
    *,
    key: bytes,
    namespace: str,
    now: Callable[[], float],
    stopped: Callable[[], bool] = lambda: False,
    admit: Callable[[Manifest], None] = lambda manifest: None,
    hold: Callable[[str], AbstractContextManager[None]] = lambda digest: nullcontext(),
) -> Manifest:
    """Put the session in the file `path` into `target`, as a pause at this moment would. Its new manifest.

    The whole file is verified before anything is written. A session that `target` has under this name is
    replaced. `admit(manifest)` may raise to refuse it. `hold(digest)` is entered while `target` is read and
    written: take the lease of a shared one. At most one chunk is in memory at a time. Blocks on I/O: call it
    from a worker.

    Raises:
        BadArchive: no export of a session, damaged, sealed with another key, of another version, or not of
            `namespace`.
        StoreFull, StoreUnavailable, LeaseHeld, Stopped
        (In all these cases `target` is as before, except when it failed after it took the manifest.)
    """

    def go_on() -> None:
        if stopped():
            raise Stopped(f"importing {path} was stopped: nothing changed in {target.name}, try again later")

    with _reading(path, key) as reader:
        manifest = _verified(reader, namespace, go_on)
        admit(manifest)
        with hold(manifest.digest), Landing(target, namespace, manifest.digest) as landing:
            generation = 1 if landing.previous is None else landing.previous.generation + 1
            chunks: list[ChunkRef] = []

            def put(ref: ChunkRef, header: bytes, segments: Sequence[memoryview]) -> None:
                go_on()
                name = chunk_key(
                    namespace, manifest.digest, generation, len(chunks), exact=is_exact_chunk(ref.key)
                )
                chunks.append(landing.put(msgspec.structs.replace(ref, key=name), header, segments))

            reader.rewind()
            _read_manifest(reader)
            _walk(reader, manifest, put)  # checks all of it again: the file may have changed
            imported = msgspec.structs.replace(
                leading(manifest, chunks), generation=generation, paused_at=now()
            )
            landing.commit(imported)
    return imported


def read_archive_manifest(path: Path, key: bytes) -> Manifest:
    """The manifest of the session in the file `path`, naming the chunks that are in it. Reads the whole file.

    Raises:
        BadArchive, StoreUnavailable
    """
    with _reading(path, key) as reader:
        return _verified(reader)


@contextmanager
def _reading(path: Path, key: bytes) -> Iterator[ArchiveReader]:
    """The open file. What is wrong with it leaves as BadArchive, an OSError as StoreUnavailable."""
    with _naming(path):
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe must not hold us up
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                raise BadArchive(f"{path} is not a regular file: name one that `krul sessions export` wrote")
            yield ArchiveReader(fd, str(path), status.st_size, key)
        except Corrupt as error:
            raise BadArchive(
                f"{path} can't be trusted ({error}): copy it here again, or export the session anew"
            ) from error
        finally:
            os.close(fd)


def _verified(
    reader: ArchiveReader, namespace: str | None = None, go_on: Callable[[], None] = lambda: None
) -> Manifest:
    """Read and check the whole file. The manifest, naming the chunks that are there."""
    manifest = _read_manifest(reader)
    if namespace is not None and manifest.namespace != namespace:
        raise BadArchive(
            f"{reader.name} was made under namespace {manifest.namespace}, this server has {namespace}: "
            "other weights, dtype, page size or version. Import it at a server that runs what the session "
            "was exported from"
        )
    count = _walk(reader, manifest, lambda ref, header, segments: go_on())
    if manifest.chunks and not count:
        raise Corrupt("length", f"none of the {len(manifest.chunks)} chunks that the manifest names")
    return leading(manifest, manifest.chunks[:count])


def _read_manifest(reader: ArchiveReader) -> Manifest:
    """The start of the file, and the manifest, consistent in itself."""
    magic, version = reader.start()
    if magic != MAGIC:
        raise BadArchive(
            f"{reader.name} begins with {magic!r}, an export of a session with {MAGIC!r}: name a file that "
            "`krul sessions export` wrote"
        )
    if version != VERSION:
        raise BadArchive(
            f"{reader.name} is an export of version {version}, this server reads version {VERSION}: "
            "import it with the version of sgl-krul that wrote it"
        )
    frame = reader.frame()
    if frame.kind != Kind.manifest:
        raise Corrupt("length", f"frame {frame.kind!r} where the manifest is expected")
    namespace, digest = _own_names(frame.payload)
    manifest = decode_manifest(frame.payload, namespace=namespace, digest=digest)
    problem = _manifest_problem(manifest)
    if problem is not None:
        raise Corrupt("identity", f"manifest: {problem}")
    return manifest


def _own_names(data: bytes) -> tuple[str, str]:
    """The namespace and digest that the manifest says it has; "" where it says none."""
    try:
        loose = msgpack.unpackb(data, strict_map_key=True)
    except (ValueError, msgpack.UnpackException):
        return "", ""  # decode_manifest will say what is wrong
    fields = loose if isinstance(loose, dict) else {}
    namespace, digest = fields.get("namespace"), fields.get("digest")
    return (namespace if isinstance(namespace, str) else "", digest if isinstance(digest, str) else "")


def _manifest_problem(manifest: Manifest) -> str | None:
    """What decode_manifest was not told: whose this is, and whether the chunks are of these tokens."""
    if not _DIGEST.fullmatch(manifest.digest):
        return f"digest {manifest.digest[:80]!r}, expected 64 hex characters"
    own = count_own_chunks(manifest)
    return None if own == len(manifest.chunks) else f"chunk {own} is not of the session's tokens"


def _walk(reader: ArchiveReader, manifest: Manifest, visit: Visit) -> int:
    """Read all chunks and the end, verified; returns how many chunks there are."""
    count = 0
    while (frame := reader.frame()).kind == Kind.chunk:
        if count == len(manifest.chunks):
            raise Corrupt("length", f"more than the {count} chunks that the manifest names")
        _visit_chunk(reader, manifest.namespace, manifest.chunks[count], frame.payload, visit)
        count += 1
    reader.end(frame, count)
    return count


def _visit_chunk(reader: ArchiveReader, namespace: str, ref: ChunkRef, data: bytes, visit: Visit) -> None:
    """A function of its own, so that the bytes of one chunk go before those of the next are read."""
    header = check_chunk(data, namespace, ref)
    visit(ref, data, reader.body(header))
