"""Settings: what they come from, and what is refused before anything starts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from pydantic import ValidationError

from app.settings import ROLES, Settings, SettingsError, is_loopback

Env = Callable[[str, str], None]


@pytest.fixture
def env(monkeypatch: pytest.MonkeyPatch) -> Env:
    return monkeypatch.setenv


@pytest.fixture
def toml(tmp_path: Path) -> Callable[[str], Path]:
    def write(text: str) -> Path:
        path = tmp_path / "dte.toml"
        path.write_text(text)
        return path

    return write


def test_without_anything_it_is_a_whole_daemon_on_loopback() -> None:
    s = Settings.load()
    assert is_loopback(s.host)
    assert s.ordered_roles == ROLES
    assert s.store is None
    assert s.store_dir == s.data_dir / "store"


def test_arguments_go_before_variables_before_the_file_before_defaults(env: Env, toml: Callable[[str], Path]) -> None:
    path = toml("port = 1\nchunk_bytes = 100000\nkeep_anchors = 5\n")
    env("DTE_PORT", "2")
    env("DTE_CHUNK_BYTES", "200000")
    s = Settings.load(path, port=3)
    assert (s.port, s.chunk_bytes, s.keep_anchors, s.anchor_every) == (3, 200000, 5, 32)


def test_an_argument_that_is_none_counts_as_not_given(env: Env) -> None:
    env("DTE_PORT", "2")
    assert Settings.load(port=None).port == 2


def test_the_file_may_be_named_by_a_variable(env: Env, toml: Callable[[str], Path]) -> None:
    env("DTE_CONFIG", str(toml('run = "r1"\n')))
    assert Settings.load().run == "r1"


def test_roles_are_a_comma_separated_list_or_a_toml_array(env: Env, toml: Callable[[str], Path]) -> None:
    assert Settings.load(toml('roles = ["store", "publisher"]')).ordered_roles == ("store", "publisher")
    env("DTE_ROLES", "subscriber, store")
    assert Settings.load().ordered_roles == ("store", "subscriber")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("DTE_PORT", "70000"),
        ("DTE_PORT", "http"),
        ("DTE_ROLES", "store,boss"),
        ("DTE_ROLES", ""),
        ("DTE_DENSE_FRACTION", "0"),
        ("DTE_DENSE_FRACTION", "nan"),
        ("DTE_POLL_INTERVAL_S", "-1"),
        ("DTE_KEEP_ANCHORS", "1"),
        ("DTE_RUN", "../x"),
        ("DTE_TOKEN", "short"),
        ("DTE_TOKEN", "has spaces in it"),
        ("DTE_DETECT_BACKEND", "magic"),
        ("DTE_LOG_LEVEL", "loud"),
    ],
)
def test_a_wrong_variable_is_named_with_its_source(env: Env, name: str, value: str) -> None:
    env(name, value)
    with pytest.raises(SettingsError) as caught:
        Settings.load()
    assert name in caught.value.message
    assert f"`{name.removeprefix('DTE_').lower()}`" in caught.value.message


def test_every_wrong_key_is_named_at_once(toml: Callable[[str], Path]) -> None:
    with pytest.raises(SettingsError) as caught:
        Settings.load(toml("port = -1\nanchor_every = 0\n"), keep_anchors=0)
    message = caught.value.message
    assert "`port` (in " in message
    assert "`anchor_every` (in " in message
    assert "`keep_anchors` (given explicitly)" in message


def test_an_unknown_key_is_refused_wherever_it_stands(env: Env, toml: Callable[[str], Path]) -> None:
    with pytest.raises(SettingsError, match="prot"):
        Settings.load(toml("prot = 1"))
    with pytest.raises(SettingsError, match="prot"):
        Settings.load(prot=1)
    env("DTE_PROT", "1")
    with pytest.raises(SettingsError, match="DTE_PROT"):
        Settings.load()


@pytest.mark.parametrize("text", ["port = ", "port = 1\nport = 2", "\x00"])
def test_a_file_that_is_no_toml_is_said_to_be_none(toml: Callable[[str], Path], text: str) -> None:
    with pytest.raises(SettingsError, match="TOML"):
        Settings.load(toml(text))


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="cannot read"):
        Settings.load(tmp_path / "none.toml")


def test_secrets_never_show(env: Env) -> None:
    env("DTE_TOKEN", "sesame sesame")
    with pytest.raises(SettingsError) as caught:
        Settings.load()
    assert "sesame" not in str(caught.value)
    env("DTE_TOKEN", "sesame-sesame")
    assert "sesame" not in repr(Settings.load())
    with pytest.raises(ValidationError) as direct:
        Settings(signing_key="sesame sesame")  # type: ignore[arg-type]
    assert "sesame" not in str(direct.value)


@pytest.mark.parametrize(
    "host", ["0.0.0.0", "::", "10.0.0.1", "example.org", "localhost.example.org", "127.0.0.1.x.org"]
)
def test_an_address_others_reach_needs_a_token(host: str) -> None:
    with pytest.raises(SettingsError, match="token"):
        Settings.load(host=host)
    assert Settings.load(host=host, token="long-enough").host == host


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "localhost"])
def test_loopback_needs_none(host: str) -> None:
    assert Settings.load(host=host).token is None


def test_a_daemon_without_a_store_of_its_own_needs_the_address_of_one() -> None:
    with pytest.raises(SettingsError, match="store"):
        Settings.load(roles="publisher")
    assert Settings.load(roles="publisher", store="http://h/store").store == "http://h/store"


RECEIVERS = """
run = "r1"
[[receivers]]
name = "actor-0"
kind = "sglang"
url = "http://127.0.0.1:30000"
[[receivers]]
name = "actor-1"
run = "r2"
sockets = ["/run/actor-1.sock"]
"""


def test_receivers_are_tables_of_the_file_or_json_in_the_variable(env: Env, toml: Callable[[str], Path]) -> None:
    first, second = Settings.load(toml(RECEIVERS)).receivers
    assert (first.name, first.kind, first.run) == ("actor-0", "sglang", "r1")
    assert (second.name, second.kind, second.run) == ("actor-1", "torch", "r2")
    env("DTE_RECEIVERS", '[{"name": "x", "run": "r3", "sockets": ["/x.sock"]}]')
    assert [r.name for r in Settings.load().receivers] == ["x"]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (RECEIVERS.replace("actor-1", "actor-0", 1), "one receiver twice"),
        (RECEIVERS.replace('run = "r1"', 'roles = ["publisher"]\nstore = "/s"\nrun = "r1"'), "no subscriber role"),
        (RECEIVERS.replace('run = "r1"', ""), "Field required"),
        (RECEIVERS.replace("url", "address"), "Extra inputs"),
    ],
)
def test_receivers_that_cannot_be_are_refused(toml: Callable[[str], Path], text: str, why: str) -> None:
    with pytest.raises(SettingsError, match=why):
        Settings.load(toml(text))


def test_p2p_needs_a_place_to_meet_where_there_is_somebody_to_bring() -> None:
    for roles in ("publisher,store", "subscriber,store"):
        with pytest.raises(SettingsError, match="p2p_coordinator"):
            Settings.load(p2p=True, roles=roles)
        assert Settings.load(p2p=True, roles=roles, p2p_coordinator="http://10.0.0.1:7411").p2p
    assert Settings.load(p2p=True, roles="store").p2p
    assert Settings.load(p2p=True).p2p
    with pytest.raises(SettingsError, match="http://HOST:PORT"):
        Settings.load(p2p=True, p2p_coordinator="10.0.0.1:7411")


def test_ranks_are_reached_where_the_daemon_listens_or_is_said_to() -> None:
    assert Settings.load().p2p_address == "127.0.0.1"
    assert Settings.load(p2p_host="node-3").p2p_address == "node-3"
    everywhere = Settings.load(host="0.0.0.0", token="long-enough")
    assert everywhere.p2p_address not in ("0.0.0.0", "")
