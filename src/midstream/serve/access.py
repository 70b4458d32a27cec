"""Who may do what: API keys, and what belongs to whose."""

from __future__ import annotations

import base64
import binascii
import hashlib
import ipaddress
import secrets
from collections.abc import Iterable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class Owner(NamedTuple):
    """Whose a request, a trace or an edit is.

    Attributes:
        id: of the key; nothing of the key can be found out from it.
        admin: whether its edits act on all requests, and it may clear others'.
    """

    id: str
    admin: bool = False


NOBODY = Owner("", admin=True)
"""Everyone, on a server without keys, which only this machine reaches."""


@dataclass
class Caller:
    """The request that this task answers.

    Attributes:
        owner: whose it is.
        edits: numbers of the edits that run beside what it generates; None until they are chosen.
        asked: whether it asked for them, so that their values belong into the reply.
        found: values and errors that edits left, in the order in which its prompts were sent;
            None of a prompt that was not finished.
    """

    owner: Owner
    edits: list[int] | None = None
    asked: bool = False
    found: list[Any] = field(default_factory=list)


CALLER: ContextVar[Caller | None] = ContextVar("midstream_caller", default=None)
"""Set by the guard for whatever runs below it."""


class Access:
    """The keys of a server.

    Args:
        keys: API keys.
        admin_keys: API keys whose edits act on everyone's requests.
    """

    def __init__(self, keys: Iterable[str] = (), admin_keys: Iterable[str] = ()):
        self._owners = {_digest(key): Owner(_digest(key).hex()[:16]) for key in keys if key}
        for key in admin_keys:
            if key:
                self._owners[_digest(key)] = Owner(_digest(key).hex()[:16], admin=True)

    @property
    def open(self) -> bool:
        """Whether no key is needed."""
        return not self._owners

    def owner(self, authorization: str) -> tuple[Owner | None, bool]:
        """Whose an `Authorization` header is.

        Returns:
            The owner, None for a wrong key, and whether a browser sent it by itself.
        """
        if self.open:
            return NOBODY, False
        scheme, _, value = authorization.strip().partition(" ")
        basic = scheme.lower() == "basic"
        if not basic and scheme.lower() != "bearer":
            return None, False
        digest = _digest(_password(value) if basic else value.strip())
        found = None
        for known, owner in self._owners.items():  # all of them: time must not tell which
            if secrets.compare_digest(known, digest):
                found = owner
        return found, basic


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def _password(value: str) -> str:
    try:
        text = base64.b64decode(value.strip(), validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        return ""
    return text.partition(":")[2]


def is_loopback(host: str | None) -> bool:
    """Whether only this machine reaches an address."""
    if host is None or host == "localhost":
        return host is not None
    try:
        return ipaddress.ip_address(host.removeprefix("[").removesuffix("]")).is_loopback
    except ValueError:
        return False  # a name, which may be anybody's


def is_local_name(host: str) -> bool:
    """Whether a `Host` header, or an origin's, names this machine: others may point here too."""
    name, colon, port = host.rpartition(":")
    return is_loopback(name if colon and port.isdigit() else host)
