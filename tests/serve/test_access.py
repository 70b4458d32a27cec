"""Keys, and which addresses are this machine."""

from __future__ import annotations

import base64

import pytest

from midstream.serve.access import NOBODY, Access, is_local_name, is_loopback


def basic(key: str) -> str:
    """A key as browsers send it."""
    return f"Basic {base64.b64encode(f'someone:{key}'.encode()).decode()}"


def test_forms_of_a_key() -> None:
    """Bearer, and what a browser asks a person for; which of them it was is told."""
    access = Access(["a", ""], ["r"])
    owner, by_itself = access.owner("Bearer a")
    assert owner is not None
    assert (owner.admin, by_itself) == (False, False)
    assert access.owner(basic("a")) == (owner, True)
    assert access.owner("bearer r")[0] is not None
    for wrong in (
        "",
        "a",
        "Bearer b",
        "Bearer",
        basic("b"),
        "Basic a",
        "Digest a",
        "Bearer \udcff",
    ):
        assert access.owner(wrong)[0] is None


def test_without_keys() -> None:
    """Everyone is one and the same, and its own administrator."""
    access = Access()
    assert access.open
    assert access.owner("anything") == (NOBODY, False)
    assert not Access([], ["r"]).open


@pytest.mark.parametrize(
    ("host", "local"),
    [
        ("127.0.0.1", True),
        ("127.8.8.8", True),
        ("localhost", True),
        ("::1", True),
        ("[::1]", True),
        ("0.0.0.0", False),
        ("::", False),
        ("", False),
        ("127.0.0.1.example.org", False),
        ("127.example.org", False),
        ("localhost.example.org", False),
        ("10.0.0.1", False),
        (None, False),
    ],
)
def test_loopback(host: str | None, local: bool) -> None:
    """A name that only begins like this machine's may be anybody's."""
    assert is_loopback(host) is local
    if host and ":" not in host:
        assert is_local_name(f"{host}:8000") is local
        assert is_local_name(host) is local
