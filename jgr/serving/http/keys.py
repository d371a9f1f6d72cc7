# SPDX-License-Identifier: Apache-2.0
"""The API keys of a server: who may ask, as whom, and how much.

The one idea: a key is known by its digest. What a caller presents is hashed under a secret of this process, and the
digest finds the key; so how long a look-up takes says nothing about any key, and keys do not stay in memory.

A key's name is its *tenant*: the cache entries of users belong to it. A server without a client's key is open: anybody
may ask, and all are one tenant without a name.
"""

from __future__ import annotations

import hmac
import json
import logging
import os
import re
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import msgspec
from msgspec import Meta, Struct

from jgr.config import ConfigError, ServerConfig
from jgr.fields import require
from jgr.files import reading
from jgr.serving.errors import RequestError
from jgr.serving.http.decoding import UNREADABLE, refusal
from jgr.serving.policies.quotas import NS_PER_S, Bucket, Places, Share

MIN_KEY_CHARS = 16
MAX_KEYS = 10_000
MAX_RATE = 1e6
MAX_CONNECTIONS = 1_000_000
MAX_FILE_BYTES = 1 << 22
TENANT = re.compile(r"[A-Za-z0-9._-]{1,64}")

Role = Literal["client", "admin"]

_log = logging.getLogger(__name__)


class KeyEntry(Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """A key in the file of server.keys, as docs/serving.md describes it."""

    name: Annotated[str, Meta(pattern=rf"^{TENANT.pattern}\Z")]
    key: Annotated[str, Meta(min_length=MIN_KEY_CHARS, max_length=512, pattern=r"^[!-~]*\Z")]
    role: Role
    rate: Annotated[float, Meta(ge=1e-3, le=MAX_RATE)] | None = None
    burst: Annotated[int, Meta(ge=1, le=int(MAX_RATE))] | None = None
    share: Annotated[float, Meta(gt=0, le=1)] | None = None
    connections: Annotated[int, Meta(ge=1, le=MAX_CONNECTIONS)] | None = None


class KeysFile(Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """The file of server.keys."""

    keys: Annotated[list[KeyEntry], Meta(max_length=MAX_KEYS)]


class Limits(NamedTuple):
    """What a key may ask for, see KeyEntry; None: there is no limit."""

    rate: float | None = None
    burst: int | None = None
    share: float | None = None
    connections: int | None = None


NO_LIMITS = Limits()


@dataclass(frozen=True, eq=False)
class Caller:
    """Who asks. tenant: whose the users' cache entries are, see `tenant`; "" on an open server.

    bucket, share, places: what is left of them; None: there is no limit.
    """

    name: str = ""
    tenant: str = ""
    role: Role = "client"
    limits: Limits = NO_LIMITS
    bucket: Bucket | None = None
    share: Share | None = None
    places: Places | None = None

    def charge(self, now_ns: int) -> None:
        """Take a token for a call. Raises RequestError where the key's rate is used up."""
        wait_ns = 0 if self.bucket is None else self.bucket.take(now_ns)
        if wait_ns:
            message = f"the key {self.name!r} has used up its rate of {self.limits.rate:g} a second; try again later"
            raise RequestError("quota_exceeded", message, retry_after_s=-(-wait_ns // NS_PER_S))


ANYBODY = Caller()


class Keys:
    """The keys of a server. Raises ConfigError, which names the field of the file that cannot be used.

    open: whether no client needs a key. parts: into how many the rates are divided, each counted by a process of its
    own. Belongs to the event loop.
    """

    def __init__(self, config: ServerConfig, parts: int = 1) -> None:
        self._config, self._parts = config, parts
        self._secret = os.urandom(32)
        self.open = not (config.api_key or config.keys)
        self._callers: dict[bytes, Caller] = {}
        self._read = _state(config.keys)
        self._take(read_keys(config))
        with suppress(OSError):  # who writes the file anew may have taken it away by now
            if config.keys and Path(config.keys).stat().st_mode & 0o077:
                _log.warning("server.keys: %s can be read by others than its owner: chmod 600", config.keys)

    @property
    def has_admin(self) -> bool:
        return any(caller.role == "admin" for caller in self._callers.values())

    @property
    def clients(self) -> list[str]:
        """The names of the keys that are clients'."""
        return [caller.name for caller in self._callers.values() if caller.role == "client"]

    def reload(self) -> None:
        """Read the file again. One that cannot be used changes nothing, and is told in the log."""
        if not self._config.keys:
            return
        before = self._terms()
        try:
            self._take(read_keys(self._config))
        except ConfigError as error:
            _log.error("the keys stay as they are: %s", error)
            return
        after = self._terms()
        added, removed = after.keys() - before.keys(), before.keys() - after.keys()
        changed = [name for name in after.keys() & before.keys() if after[name] != before[name]]
        were = "1 key was" if len(added) == 1 else f"{len(added)} keys were"
        _log.info("server.keys: %s added, %d removed, %d changed", were, len(removed), len(changed))

    def _terms(self) -> dict[str, tuple[object, ...]]:
        """What a line of the file says of each key, by its name."""
        return {caller.name: (digest, caller.role, caller.limits) for digest, caller in self._callers.items()}

    def refresh(self) -> None:
        """Reload where the file is another one, or was written, since this was asked last. For processes that no signal
        reaches."""
        if (state := _state(self._config.keys)) != self._read:
            self._read = state
            self.reload()

    def find(self, header: bytes) -> Caller | None:
        """The caller whose key stands in an Authorization header; None where it is nobody's."""
        scheme, _, key = header.partition(b" ")
        if scheme.lower() != b"bearer":
            return None
        digest = self._digest(key.strip())
        caller = self._callers.get(digest)
        known = digest if caller is not None else bytes(len(digest))
        return caller if hmac.compare_digest(digest, known) else None

    def client(self, header: bytes) -> Caller:
        """Who asks for what every client may have. Raises RequestError for a key that is no client's."""
        if self.open:
            return ANYBODY
        caller = self.find(header)
        if caller is None:
            raise _unauthorized("API key", header)
        if caller.role != "client":
            raise RequestError(
                "forbidden",
                f"the key {caller.name!r} is an admin's: it changes models and catalogs, and erases users' cache "
                "entries; anything else takes a client's key",
            )
        return caller

    def admin(self, header: bytes) -> Caller:
        """Who changes the server. Raises RequestError for a key that is no admin's, and where there is none."""
        if not self.has_admin:
            raise RequestError(
                "forbidden", "server.admin_key is not set; start the server with one to allow this"
            )
        caller = self.find(header)
        if caller is None:
            raise _unauthorized("admin key", header)
        if caller.role != "admin":
            raise RequestError(
                "forbidden",
                f"the key {caller.name!r} is a client's: it asks, and changes nothing; this takes an admin's key",
            )
        return caller

    def either(self, header: bytes) -> Caller:
        """A client, or an admin."""
        caller = self.find(header)
        return caller if caller is not None and caller.role == "admin" else self.client(header)

    def _take(self, entries: list[KeyEntry]) -> None:
        before = {caller.name: caller for caller in self._callers.values()}
        callers = {}
        for entry in entries:
            old = before.get(entry.name, ANYBODY)
            callers[self._digest(entry.key.encode())] = Caller(
                entry.name,
                "" if self.open else tenant(entry.name),
                entry.role,
                Limits(entry.rate, entry.burst, entry.share, entry.connections),
                self._bucket(entry, old),
                _share(entry, old),
                _places(entry, old),
            )
        self._callers = callers

    def _bucket(self, entry: KeyEntry, old: Caller) -> Bucket | None:
        if entry.rate is None:
            return None
        if old.bucket is not None and old.limits[:2] == (entry.rate, entry.burst):
            return old.bucket  # what is used up stays used up
        burst = entry.burst or max(1, round(entry.rate))
        return Bucket(entry.rate / self._parts, -(-burst // self._parts))

    def _digest(self, key: bytes) -> bytes:
        return blake2b(key, digest_size=32, key=self._secret).digest()


def _share(entry: KeyEntry, old: Caller) -> Share | None:
    """The share of a key: the one that it had, since requests are still held under it."""
    if entry.share is None:
        return None
    found = old.share or Share(entry.share)
    found.change(entry.share)
    return found


def _places(entry: KeyEntry, old: Caller) -> Places | None:
    """The places of a key's connections: those that it had, since connections are still held under them."""
    if entry.connections is None:
        return None
    found = old.places or Places(entry.connections)
    found.change(entry.connections)
    return found


def tenant(name: str) -> str:
    """A key's name as Engine.submit takes it."""
    return f"{name}/"


def read_keys(config: ServerConfig) -> list[KeyEntry]:
    """The keys of the configuration and of its file. Raises ConfigError, which names the field at fault."""
    own: list[tuple[str, Role, str]] = [
        ("default", "client", config.api_key),
        ("admin", "admin", config.admin_key),
    ]
    entries = [KeyEntry(name=name, key=key, role=role) for name, role, key in own if key]
    places = [f"server.{'admin' if entry.name == 'admin' else 'api'}_key" for entry in entries]
    if config.keys:
        listed = _read_file(Path(config.keys))
        entries += listed
        places += [f"keys[{at}]" for at in range(len(listed))]
        some = any(entry.role == "client" for entry in entries)
        require(some, f"server.keys: {config.keys}: keys: none is a client's, so that nobody could ask")
    for field in ("name", "key"):
        first: dict[str, str] = {}
        for entry, place in zip(entries, places, strict=True):
            other = first.setdefault(getattr(entry, field), place)
            require(
                other == place,
                f"server.keys: {config.keys}: {place}.{field} is that of {other}; each must be different",
            )
    return entries


def _state(path: str) -> tuple[int, int, int] | None:
    """What changes with a file's content; None where there is no file."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


def _read_file(path: Path) -> list[KeyEntry]:
    try:
        with reading(path, ConfigError) as stream:
            content = stream.read(MAX_FILE_BYTES + 1)
    except ConfigError as error:
        raise ConfigError(f"server.keys: {error}") from None
    require(len(content) <= MAX_FILE_BYTES, f"server.keys: {path}: holds more than {MAX_FILE_BYTES} bytes")
    try:
        entries = msgspec.json.decode(content, type=KeysFile).keys
    except msgspec.ValidationError as error:
        found = refusal(error, content, KeysFile).message.replace("the body", "the file", 1)
        raise ConfigError(f"server.keys: {path}: {found}") from None
    except UNREADABLE as error:
        raise ConfigError(f"server.keys: {path}: is not JSON: {error}") from None
    json.loads(content, object_pairs_hook=partial(_require_once, path))
    for at, entry in enumerate(entries):
        alone = entry.burst is not None and entry.rate is None
        require(not alone, f"server.keys: {path}: keys[{at}].burst needs a rate")
    return entries


def _require_once(path: Path, pairs: list[tuple[str, object]]) -> None:
    """Refuse an object that names a field twice, of which readers of JSON take the last one alone."""
    seen: set[str] = set()
    for name, _ in pairs:
        require(name not in seen, f"server.keys: {path}: the name {name!r} stands twice in one place")
        seen.add(name)


def _unauthorized(name: str, header: bytes) -> RequestError:
    came = f"; what came is no {name} of this server" if header else ""
    return RequestError("unauthorized", f"needs the header 'Authorization: Bearer <{name}>'{came}")
