"""Names of the keys in Redis, and the scripts that change several of them at once.

The object D/N is the hash `<prefix>:{D}/N`; `<prefix>:{D}` is the index of the directory D (name -> "bytes
modified"), `<prefix>:{D}/.lease` says who writes there, `<prefix>:{D}/.tmp-*` are objects half written. The
braces make Redis Cluster keep all of a directory in one slot. A part of a tier key never starts with a dot or
holds a brace, so no two of these collide. Two more keys list the directories: by name, and when each was
last written. The root directory (D empty) is called "/".
"""

from __future__ import annotations

import re
from typing import NamedTuple, TypeAlias

from sgl_krul.store.tier import Entry, is_key

__all__ = [
    "DIRECTORIES",
    "Command",
    "Keys",
    "Request",
    "keys_of",
    "parse_entry",
    "parse_tag",
    "split_key",
    "type_of",
]

Command: TypeAlias = tuple[bytes | str | int | float | memoryview, ...]

DIRECTORIES = "/directories"  # the tag of the two lists; no directory is called so
_ROOT = "/"
_VALUE = re.compile(rb"([0-9]{1,18}) ([0-9]{1,12}\.[0-9]{6})")

# Scripts answer {word, ...}. Those that may run while the server is out of memory must say so: a lease is
# needed to delete. COMMIT must not: its HSET fails for want of memory before anything has changed.

# Each of these begins with the lease; ARGV token lease_ms. Ours always end by themselves: one that would not
# was written by something else, or made to last, and is held for `lease_ms` more.
_HOLDER = """
local holder = redis.call('GET', KEYS[1])
if holder and redis.call('PTTL', KEYS[1]) == -1 then redis.call('PEXPIRE', KEYS[1], ARGV[2]) end
"""

_LEASE_CHECK = (
    _HOLDER
    + """
if ARGV[1] == '' then
  if holder then return {'held', holder, redis.call('PTTL', KEYS[1])} end
elseif holder ~= ARGV[1] then
  return {'lost', holder or '', redis.call('PTTL', KEYS[1])}
end
"""
)

# KEYS lease tmp object index; ARGV token lease_ms name fields bytes ttl_ms shape. An object lives as long
# as its put says, an index as long as the object in it that lives longest.
_COMMIT = (
    _LEASE_CHECK
    + """
if redis.call('HLEN', KEYS[2]) ~= tonumber(ARGV[4]) then
  if redis.call('HGET', KEYS[3], 'm') == ARGV[7] then return {'ok', '', 0} end
  return {'gone'}
end
local old = redis.call('HGET', KEYS[4], ARGV[3]) or ''
local now = redis.call('TIME')
redis.call('HSET', KEYS[4], ARGV[3], string.format('%s %s.%06d', ARGV[5], now[1], tonumber(now[2])))
redis.call('RENAME', KEYS[2], KEYS[3])
redis.call('PEXPIRE', KEYS[3], ARGV[6])
if redis.call('PTTL', KEYS[4]) < tonumber(ARGV[6]) then redis.call('PEXPIRE', KEYS[4], ARGV[6]) end
if ARGV[1] ~= '' then redis.call('PEXPIRE', KEYS[1], ARGV[2]) end
return {'ok', old, redis.call('HLEN', KEYS[4])}
"""
)

# KEYS lease object index; ARGV token lease_ms name
_DELETE = (
    _LEASE_CHECK
    + """
local old = redis.call('HGET', KEYS[3], ARGV[3]) or ''
local existed = redis.call('DEL', KEYS[2])
redis.call('HDEL', KEYS[3], ARGV[3])
if ARGV[1] ~= '' then redis.call('PEXPIRE', KEYS[1], ARGV[2]) end
return {'ok', old, redis.call('HLEN', KEYS[3]), existed}
"""
)

# KEYS lease; ARGV token lease_ms left. The same token again repeats a call whose answer got lost. `left`
# is a lease of ours that could not be given back; what was sent with it and comes late finds it lost.
_LEASE = (
    "#!lua flags=allow-oom"
    + _HOLDER
    + """
if holder and (holder == '' or holder ~= ARGV[1] and holder ~= ARGV[3]) then
  return {'held', holder, redis.call('PTTL', KEYS[1])}
end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return {'ok'}
"""
)

_RENEW = (
    _LEASE_CHECK
    + """
redis.call('PEXPIRE', KEYS[1], ARGV[2])
return {'ok'}
"""
)

_RELEASE = """
if redis.call('GET', KEYS[1]) == ARGV[1] then redis.call('DEL', KEYS[1]) end
return {'ok'}
"""

# KEYS index object..; ARGV name..: names whose object has gone by itself
_REPAIR = """
for i, name in ipairs(ARGV) do
  if redis.call('EXISTS', KEYS[i + 1]) == 0 then redis.call('HDEL', KEYS[1], name) end
end
return {'ok'}
"""

# KEYS names times; ARGV tag ttl_ms
_LIST = """
local now = redis.call('TIME')
redis.call('ZADD', KEYS[1], 0, ARGV[1])
redis.call('ZADD', KEYS[2], string.format('%s%06d', now[1], tonumber(now[2])), ARGV[1])
for i = 1, 2 do
  if redis.call('PTTL', KEYS[i]) < tonumber(ARGV[2]) then redis.call('PEXPIRE', KEYS[i], ARGV[2]) end
end
return {'ok'}
"""

# KEYS names times; ARGV tag score_or_empty age_us: with a score, if it is still that; else if that old
_UNLIST = """
local score = redis.call('ZSCORE', KEYS[2], ARGV[1])
if ARGV[2] ~= '' then
  if score and score ~= ARGV[2] then return {'ok'} end
elseif score then
  local now = redis.call('TIME')
  local age_us = tonumber(now[1]) * 1000000 + tonumber(now[2]) - tonumber(score)
  if age_us < tonumber(ARGV[3]) then return {'ok'} end
end
redis.call('ZREM', KEYS[1], ARGV[1])
redis.call('ZREM', KEYS[2], ARGV[1])
return {'ok'}
"""


class Request(NamedTuple):
    """One command, and the hash tag of its keys: it decides which server of a cluster gets it."""

    tag: str
    command: Command


def split_key(key: str) -> tuple[str, str]:
    """Tag of the directory of a tier key, and the name in it."""
    directory, _, name = key.rpartition("/")
    return directory or _ROOT, name


def keys_of(command: Command) -> list[str]:
    """The Redis keys a command names. Of those we send."""
    if command[0] == "EVAL":
        count = command[2]
        assert isinstance(count, int)
        return [str(key) for key in command[3 : 3 + count]]
    return [str(key) for key in command[1:2]]


def type_of(key: str) -> bytes:
    """What TYPE says of a key of ours, by its name."""
    if key.endswith("}/.lease"):
        return b"string"
    return b"zset" if f":{{{DIRECTORIES}}}:" in key else b"hash"


def parse_tag(raw: object) -> str | None:
    """The tag a list of directories gives, or None when it is none."""
    if not isinstance(raw, bytes) or not raw.isascii():
        return None
    tag = raw.decode("ascii")
    return tag if tag == _ROOT or is_key(tag) else None


def parse_entry(tag: str, name: object, value: object) -> Entry | None:
    """An entry of the index of a directory, or None when it is none."""
    match = _VALUE.fullmatch(value) if isinstance(value, bytes) else None
    if match is None or not isinstance(name, bytes) or not name.isascii() or b"/" in name:
        return None
    key = name.decode("ascii") if tag == _ROOT else f"{tag}/{name.decode('ascii')}"
    return Entry(key, int(match[1]), float(match[2])) if is_key(key) else None


class Keys:
    """The Redis keys below one prefix, and the commands that run the scripts on them."""

    def __init__(self, prefix: str, ttl_ms: int, lease_ms: int) -> None:
        self._prefix = prefix
        self.ttl_ms = ttl_ms
        self.lease_ms = lease_ms
        self.names = f"{prefix}:{{{DIRECTORIES}}}:names"
        self.times = f"{prefix}:{{{DIRECTORIES}}}:times"

    def index(self, tag: str) -> str:
        """Index of a directory."""
        return f"{self._prefix}:{{{tag}}}"

    def object(self, tag: str, name: str) -> str:
        """One object."""
        return f"{self._prefix}:{{{tag}}}/{name}"

    def temporary(self, tag: str, token: bytes) -> str:
        """An object half written."""
        return f"{self._prefix}:{{{tag}}}/.tmp-{token.hex()}"

    def lease(self, tag: str) -> str:
        """Who writes a directory."""
        return f"{self._prefix}:{{{tag}}}/.lease"

    def extend(self, tag: str, key: str) -> Request:
        """Start the life time of an object or index anew. Never shortens the one a server with a longer
        `ttl_s` gave it, nor ends that of a key somebody made to last."""
        return Request(tag, ("PEXPIRE", key, self.ttl_ms, "GT"))

    def commit(
        self, tag: str, name: str, *, token: bytes, lease: str, fields: int, size: int, shape: bytes
    ) -> Request:
        """Move the temporary object of `token` into place: ok, old value, entries; or held, lost, gone."""
        keys = self.lease(tag), self.temporary(tag, token), self.object(tag, name), self.index(tag)
        return _eval(tag, _COMMIT, keys, lease, self.lease_ms, name, fields, size, self.ttl_ms, shape)

    def delete(self, tag: str, name: str, lease: str) -> Request:
        """Remove an object: ok, old value, entries now, 1 if there was one; or held, lost."""
        keys = self.lease(tag), self.object(tag, name), self.index(tag)
        return _eval(tag, _DELETE, keys, lease, self.lease_ms, name)

    def take_lease(self, tag: str, lease: str, left: str) -> Request:
        """Take a lease, also from `left`, an earlier one of ours: ok or held."""
        return _eval(tag, _LEASE, (self.lease(tag),), lease, self.lease_ms, left)

    def renew_lease(self, tag: str, lease: str) -> Request:
        """Keep a lease: ok or lost."""
        return _eval(tag, _RENEW, (self.lease(tag),), lease, self.lease_ms)

    def release_lease(self, tag: str, lease: str) -> Request:
        """Give a lease back if it is still ours."""
        return _eval(tag, _RELEASE, (self.lease(tag),), lease)

    def repair(self, tag: str, names: list[str]) -> Request:
        """Remove those names from an index whose object has gone."""
        keys = self.index(tag), *(self.object(tag, name) for name in names)
        return _eval(tag, _REPAIR, keys, *names)

    def list_directory(self, tag: str) -> Request:
        """Add a directory to the lists. They live twice as long as objects: reading does not renew them."""
        return _eval(DIRECTORIES, _LIST, (self.names, self.times), tag, 2 * self.ttl_ms)

    def unlist_directory(self, tag: str, *, score: bytes = b"", age_s: float = 0.0) -> Request:
        """Take a directory from the lists if its score is still `score`, or without one if that old."""
        return _eval(DIRECTORIES, _UNLIST, (self.names, self.times), tag, score, int(age_s * 1e6))


def _eval(tag: str, script: str, keys: tuple[str, ...], *arguments: bytes | str | int) -> Request:
    return Request(tag, ("EVAL", script, len(keys), *keys, *arguments))
