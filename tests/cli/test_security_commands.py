"""`fedmpq server init`, `token`, `bundle`, `limit`, `revoke`: what they leave on disk and in the store."""

from __future__ import annotations

import argparse
import json
import os
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from fedmpq.cli.main import main
from fedmpq.cli.security_commands import ACTIONS
from fedmpq.cli.server_command import SECURITY_ACTIONS
from fedmpq.server.access import AccessError
from fedmpq.server.blobs import Uploads
from fedmpq.server.certificates import ALWAYS, CertificateError, hosts_of, read_authority, read_certificate
from fedmpq.server.claim_limits import UNLIMITED, ClaimLimits, LimitError
from fedmpq.server.database import DatabaseError
from fedmpq.server.state_folder import StateError, StateFolder
from fedmpq.server.store.errors import NameTaken, TokenRefused
from fedmpq.server.store.protocol import Store
from fedmpq.server.store.sql import open_store
from fedmpq.server.tokens import TokenError, token_digest

Capture = pytest.CaptureFixture[str]


def act(action: str, *words: str | Path) -> int:
    parser = argparse.ArgumentParser()
    ACTIONS[action].add_arguments(parser)
    return ACTIONS[action].run(parser.parse_args([str(word) for word in words]))


def facts(capsys: Capture, action: str, *words: str | Path) -> dict[str, Any]:
    """What it prints as JSON."""
    capsys.readouterr()
    assert act(action, *words, "--json") == 0
    out, err = capsys.readouterr()
    assert err == ""
    found: dict[str, Any] = json.loads(out)
    return found


@contextmanager
def store_of(state: Path) -> Iterator[Store]:
    store = open_store(StateFolder(state).database_url())
    try:
        yield store
    finally:
        store.close()


def enrol(state: Path, token: str, name: str) -> str:
    """As the server does at a client's call; the id of the client."""
    with store_of(state) as store:
        client_id = store.enrol(token_digest(token), name, 4.0, "1", b"s" * 32, name, time.time())
        store.mark_seen([client_id], time.time())
        return client_id


@pytest.fixture
def state(tmp_path: Path) -> Path:
    folder = tmp_path / "state"
    act("init", "--state", folder)
    return folder


# init


def test_init_makes_a_folder_that_is_ready_to_serve(tmp_path: Path, capsys: Capture) -> None:
    state = tmp_path / "some" / "where"
    assert (
        act("init", "--state", state, "--host", "fl.example.org", "--host", "192.0.2.7", "--days", "9") == 0
    )
    out, err = capsys.readouterr()
    assert err == ""
    assert "fl.example.org, 192.0.2.7, localhost, 127.0.0.1, ::1" in out
    assert f"fedmpq server run.toml --state {state}" in out
    certificate = read_certificate(state / "tls" / "server.pem")
    assert hosts_of(certificate) == ("fl.example.org", "192.0.2.7", *ALWAYS)
    key = load_pem_private_key((state / "tls" / "server.key").read_bytes(), None)
    assert key.public_key() == certificate.public_key()
    read_authority(state / "tls")
    days = (certificate.not_valid_after_utc.timestamp() - time.time()) / 86400
    assert 8.9 < days <= 9
    token = next(word for word in out.split() if word.startswith("fmq_"))
    assert enrol(state, token, "camera-1")


def test_only_the_owner_can_read_what_init_and_bundle_made(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        act("init", "--state", tmp_path / "state")
        act("bundle", "a", "--state", tmp_path / "state")
    finally:
        os.umask(before)
    for folder in (tmp_path / "state", *(tmp_path / "state").rglob("*")):
        mode = stat.S_IMODE(folder.stat().st_mode)
        if folder.name.startswith("fedmpq.db"):
            continue  # the folder keeps others out of SQLite's files
        assert mode == (0o700 if folder.is_dir() else 0o600), folder


def test_a_token_is_nowhere_on_the_disk(tmp_path: Path, capsys: Capture) -> None:
    state = tmp_path / "state"
    token = facts(capsys, "init", "--state", state)["token"]["token"]
    for path in state.rglob("*"):
        assert path.is_dir() or token.encode() not in path.read_bytes()


def test_init_says_how_to_go_on_where_there_is_one(state: Path) -> None:
    before = {path: path.read_bytes() for path in (state / "tls").iterdir()}
    with pytest.raises(AccessError, match=r"ca\.pem is there; --renew .* --overwrite"):
        act("init", "--state", state)
    assert {path: path.read_bytes() for path in (state / "tls").iterdir()} == before


def test_renewing_keeps_the_authority_and_the_names(state: Path) -> None:
    act("init", "--state", state, "--host", "fl.example.org", "--overwrite")
    before = {path.name: path.read_bytes() for path in (state / "tls").iterdir()}
    act("init", "--state", state, "--renew")
    after = {path.name: path.read_bytes() for path in (state / "tls").iterdir()}
    assert {name for name in before if before[name] != after[name]} == {"server.pem", "server.key"}
    assert hosts_of(read_certificate(state / "tls" / "server.pem"))[0] == "fl.example.org"
    act("init", "--state", state, "--renew", "--host", "new.example.org")
    assert hosts_of(read_certificate(state / "tls" / "server.pem")) == ("new.example.org", *ALWAYS)


def test_overwriting_makes_another_authority_and_keeps_the_clients(state: Path, capsys: Capture) -> None:
    token = facts(capsys, "token", "--state", state)["token"]
    enrol(state, token, "camera-1")
    before = read_authority(state / "tls").certificate
    act("init", "--state", state, "--overwrite")
    assert read_authority(state / "tls").certificate != before
    with store_of(state) as store:
        assert [client.name for client in store.list_clients()] == ["camera-1"]


def test_renewing_what_was_never_made(tmp_path: Path) -> None:
    with pytest.raises(StateError, match="fedmpq server init --state"):
        act("init", "--state", tmp_path / "nothing", "--renew")


def test_a_folder_with_other_things_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("")
    tmp_path.chmod(0o755)
    with pytest.raises(StateError, match="not empty and no server's folder"):
        act("init", "--state", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o755
    with pytest.raises(StateError, match="is a file"):
        act("init", "--state", tmp_path / "thesis.tex")


def test_a_bad_host_makes_nothing(tmp_path: Path) -> None:
    with pytest.raises(CertificateError, match="neither a host name nor an address"):
        act("init", "--state", tmp_path / "state", "--host", "https://x.org")
    assert not (tmp_path / "state").exists()


@pytest.mark.parametrize("url", ["nonsense", "oracle+none://somewhere/x"])
def test_a_database_that_is_refused_is_not_remembered(tmp_path: Path, url: str) -> None:
    with pytest.raises(DatabaseError):
        act("init", "--state", tmp_path / "s", "--database", url)
    assert not (tmp_path / "s" / "database").exists()
    assert act("init", "--state", tmp_path / "s") == 0


def test_the_store_may_be_elsewhere(tmp_path: Path, database_url: str, capsys: Capture) -> None:
    state = tmp_path / "state"
    token = facts(capsys, "init", "--state", state, "--database", database_url)["token"]
    assert not (state / "fedmpq.db").exists()
    assert [entry["id"] for entry in facts(capsys, "token", "--list", "--state", state)["tokens"]] == [
        token["id"]
    ]
    store = open_store(database_url)
    try:
        assert [record.token_id for record in store.list_tokens()] == [token["id"]]
    finally:
        store.close()


# token


def test_a_token_is_good_for_as_many_as_it_says(state: Path, capsys: Capture) -> None:
    once = facts(capsys, "token", "--state", state)
    twice = facts(capsys, "token", "--uses", "2", "--state", state)
    many = facts(capsys, "token", "--many", "--state", state)
    assert (once["uses_left"], twice["uses_left"], many["uses_left"]) == (1, 2, None)
    enrol(state, once["token"], "a")
    with pytest.raises(TokenRefused, match="used up"):
        enrol(state, once["token"], "b")
    enrol(state, twice["token"], "c")
    enrol(state, twice["token"], "d")
    with pytest.raises(TokenRefused, match="used up"):
        enrol(state, twice["token"], "e")
    for name in "fghij":
        enrol(state, many["token"], name)
    listed = {entry["id"]: entry for entry in facts(capsys, "token", "--list", "--state", state)["tokens"]}
    assert [listed[token["id"]]["state"] for token in (once, twice, many)] == ["used", "used", "valid"]
    assert not any("token" in entry for entry in listed.values())


def test_a_token_has_an_end(state: Path, capsys: Capture) -> None:
    token = facts(capsys, "token", "--days", "0.00001", "--state", state)
    time.sleep(1)
    with pytest.raises(TokenRefused, match="expired on"):
        enrol(state, token["token"], "a")
    assert facts(capsys, "token", "--list", "--state", state)["tokens"][-1]["state"] == "expired"


def test_a_revoked_token_enrols_nobody_and_its_clients_stay(state: Path, capsys: Capture) -> None:
    token = facts(capsys, "token", "--many", "--state", state)
    client_id = enrol(state, token["token"], "a")
    assert act("token", "--revoke", token["id"], "--state", state) == 0
    with pytest.raises(TokenRefused, match="revoked"):
        enrol(state, token["token"], "b")
    with store_of(state) as store:
        assert store.client_by_id(client_id) is not None
    with pytest.raises(AccessError, match="no token 'nonsense'; --list"):
        act("token", "--revoke", "nonsense", "--state", state)


def test_the_list_for_people(state: Path, capsys: Capture) -> None:
    act("bundle", "camera-1", "--state", state)
    capsys.readouterr()
    act("token", "--list", "--state", state)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["ID", "STATE", "USES", "LEFT", "ENDS", "FOR"]
    assert [line.split()[1:3] for line in lines[1:]] == [["valid", "1"], ["valid", "1"]]
    assert lines[1].endswith("any client")
    assert lines[2].endswith("camera-1")


@pytest.mark.parametrize("words", [["--uses", "0"], ["--uses", "-3"], ["--days", "0"], ["--days", "nan"]])
def test_a_token_of_no_use_is_not_made(state: Path, capsys: Capture, words: list[str]) -> None:
    with pytest.raises(TokenError, match="a token cannot be"):
        act("token", *words, "--state", state)
    assert len(facts(capsys, "token", "--list", "--state", state)["tokens"]) == 1


@pytest.mark.parametrize("action", [["token"], ["bundle", "a"], ["revoke", "a"]])
def test_without_a_folder_there_is_nothing_to_do(tmp_path: Path, action: list[str]) -> None:
    with pytest.raises(StateError, match="is no server's folder; name it with --state, or make it"):
        act(*action, "--state", tmp_path / "nothing")
    assert not (tmp_path / "nothing").exists()


# bundle


def test_a_bundle_is_all_that_a_board_needs(state: Path, capsys: Capture) -> None:
    made = facts(capsys, "bundle", "camera-1", "camera-2", "camera-1", "--state", state)
    assert made == {"bundles": [str(state / "bundles" / name) for name in ("camera-1", "camera-2")]}
    folder = state / "bundles" / "camera-1"
    assert sorted(path.name for path in folder.iterdir()) == ["ca.pem", "client.key", "client.pem", "token"]
    authority = read_authority(state / "tls").certificate
    assert read_certificate(folder / "ca.pem") == authority
    certificate = read_certificate(folder / "client.pem")
    certificate.verify_directly_issued_by(authority)
    assert certificate.subject == x509.Name.from_rfc4514_string("CN=camera-1")
    assert (
        load_pem_private_key((folder / "client.key").read_bytes(), None).public_key()
        == certificate.public_key()
    )


def test_a_bundles_token_enrols_its_own_board_alone(state: Path) -> None:
    act("bundle", "camera-1", "--state", state)
    token = (state / "bundles" / "camera-1" / "token").read_text().strip()
    with pytest.raises(TokenRefused, match="for the client 'camera-1'"):
        enrol(state, token, "camera-2")
    enrol(state, token, "camera-1")


def test_a_bundle_is_not_overwritten_unless_told_to(state: Path) -> None:
    act("bundle", "camera-1", "--state", state)
    folder = state / "bundles" / "camera-1"
    before = (folder / "token").read_text().strip()
    with pytest.raises(AccessError, match="camera-1 is there; --overwrite"):
        act("bundle", "camera-2", "camera-1", "--state", state)
    assert not (state / "bundles" / "camera-2").exists()
    act("bundle", "camera-1", "--overwrite", "--state", state)
    with pytest.raises(TokenRefused, match="revoked"):
        enrol(state, before, "camera-1")
    enrol(state, (folder / "token").read_text().strip(), "camera-1")


@pytest.mark.parametrize("name", ["../tls", "a/b", "."])
def test_a_name_cannot_leave_the_folder(state: Path, name: str) -> None:
    with pytest.raises(CertificateError, match="cannot be a client's name"):
        act("bundle", name, "--state", state)
    assert not (state / "bundles").exists()
    with pytest.raises(AccessError, match="there is no client"):
        act("revoke", name, "--state", state)


def test_revoking_a_strange_name_touches_no_file(state: Path, capsys: Capture) -> None:
    (state / "bundles").mkdir()
    before = sorted(state.rglob("*"))
    client_id = enrol(state, facts(capsys, "token", "--state", state)["token"], "..")
    assert act("revoke", "..", "--state", state) == 0
    assert sorted(state.rglob("*")) == before
    with store_of(state) as store:
        assert store.client_by_id(client_id) is None


# limit


def test_limits_are_set_on_tokens_bundles_and_clients(state: Path, capsys: Capture) -> None:
    made = facts(capsys, "token", "--state", state, "--max-samples", "500", "--max-budget", "4")
    assert (made["max_samples"], made["max_budget"]) == (500, 4.0)
    enrol(state, made["token"], "a")
    act("bundle", "b", "--state", state, "--max-samples", "70")
    enrol(state, (state / "bundles" / "b" / "token").read_text().strip(), "b")
    with store_of(state) as store:
        limits = {client.name: client.limits for client in store.list_clients()}
    assert limits == {"a": ClaimLimits(500, 4.0), "b": ClaimLimits(70, None)}
    assert facts(capsys, "limit", "a", "b", "--state", state, "--max-budget", "2.5") == {
        "limited": [{"name": name, "max_samples": None, "max_budget": 2.5} for name in ("a", "b")]
    }
    act("limit", "b", "--state", state)
    assert "b: no limit" in capsys.readouterr().out
    with store_of(state) as store:
        limits = {client.name: client.limits for client in store.list_clients()}
    assert limits == {"a": ClaimLimits(None, 2.5), "b": UNLIMITED}
    act("token", "--list", "--state", state)
    assert "500 samples, 4 bits per weight" in capsys.readouterr().out


def test_every_action_is_reached_from_the_command_line(state: Path, capsys: Capture) -> None:
    assert tuple(ACTIONS) == SECURITY_ACTIONS
    for name in ACTIONS:
        with pytest.raises(SystemExit):
            main(["server", name, "--help"])
        assert capsys.readouterr().out.startswith(f"usage: fedmpq server {name} ")
    act("bundle", "a", "--state", state)
    enrol(state, (state / "bundles" / "a" / "token").read_text().strip(), "a")
    assert main(["server", "limit", "a", "--max-samples", "70", "--state", str(state)]) == 0
    assert "a: at most 70 samples count" in capsys.readouterr().out


def test_a_client_gets_another_name(state: Path, capsys: Capture) -> None:
    token = facts(capsys, "token", "--state", state, "--uses", "2")["token"]
    client_id = enrol(state, token, "camera-1")
    enrol(state, token, "camera-2")
    assert main(["server", "rename", "camera-1", "attic", "--state", str(state)]) == 0
    assert capsys.readouterr().out == "camera-1 is attic now\n"
    with store_of(state) as store:
        client = store.client_by_id(client_id)
    assert client is not None
    assert client.name == "attic"
    with pytest.raises(NameTaken, match="'camera-2' is enrolled"):
        act("rename", "attic", "camera-2", "--state", state)
    with pytest.raises(AccessError, match="there is no client 'camera-1'; enrolled are: attic, camera-2"):
        act("rename", "camera-1", "yard", "--state", state)
    with pytest.raises(AccessError, match="is no name: take 1 to 64"):
        act("rename", "attic", "../yard", "--state", state)


def test_limits_that_cannot_be_are_refused(state: Path) -> None:
    with pytest.raises(AccessError, match="no client 'a'"):
        act("limit", "a", "--state", state, "--max-samples", "5")
    with pytest.raises(LimitError, match="2 or more"):
        act("token", "--state", state, "--max-samples", "1")
    with pytest.raises(LimitError, match=r"outside 1\.\.8"):
        act("token", "--state", state, "--max-budget", "nan")


# revoke


def test_a_revoked_client_is_nobody_and_its_name_is_free(state: Path, capsys: Capture) -> None:
    act("bundle", "camera-1", "--state", state)
    folder = state / "bundles" / "camera-1"
    client_id = enrol(state, (folder / "token").read_text().strip(), "camera-1")
    with pytest.raises(NameTaken, match="revoke camera-1"):
        enrol(state, facts(capsys, "token", "--state", state)["token"], "camera-1")
    uploads = Uploads(state / "uploads")
    uploads.begin(client_id, bytes(32), 0)
    uploads.begin("f" * 32, bytes(32), 0)
    found = facts(capsys, "revoke", "camera-1", "--state", state)
    assert [path.name[:32] for path in (state / "uploads").iterdir()] == ["f" * 32]
    assert found == {"revoked": [{"name": "camera-1", "client_id": client_id, "revoked_tokens": []}]}
    assert not folder.exists()
    with store_of(state) as store:
        assert store.client_by_id(client_id) is None
    act("bundle", "camera-1", "--state", state)
    assert enrol(state, (folder / "token").read_text().strip(), "camera-1") != client_id


def test_a_board_stolen_before_it_enrolled(state: Path, capsys: Capture) -> None:
    act("bundle", "camera-1", "--state", state)
    folder = state / "bundles" / "camera-1"
    token = (folder / "token").read_text().strip()
    (folder / "notes").write_text("in the yard")
    capsys.readouterr()
    act("revoke", "camera-1", "--state", state)
    assert capsys.readouterr().out == (
        "camera-1: revoked no identity, for it never enrolled; unused tokens revoked: 1\n"
    )
    assert [path.name for path in folder.iterdir()] == ["notes"]
    with pytest.raises(TokenRefused, match="revoked"):
        enrol(state, token, "camera-1")


def test_revoking_a_stranger_revokes_nobody(state: Path) -> None:
    act("bundle", "camera-1", "--state", state)
    client_id = enrol(state, (state / "bundles" / "camera-1" / "token").read_text().strip(), "camera-1")
    with pytest.raises(AccessError, match=r"no client 'camera-2' .* enrolled are: camera-1"):
        act("revoke", "camera-1", "camera-2", "--state", state)
    with store_of(state) as store:
        assert store.client_by_id(client_id) is not None
