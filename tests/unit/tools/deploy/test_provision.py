"""The credentials of a deployment: who can read what, whom TLS trusts, and that a failed call changes nothing."""

import base64
import datetime
import ipaddress
import os
import shutil
import ssl
import stat
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
    load_ssh_private_key,
)
from cryptography.x509.verification import PolicyBuilder, Store, VerificationError
from hypothesis import example, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from tepal.host.processes import free_port
from tepal.strategies.rounds.report import SERVER
from tepal.tools.cli.provision import app as provision
from tepal.tools.deploy.fleet import Fleet, FleetError, KeyResult, Unreachable, align, open_fleet
from tepal.tools.deploy.provision import (
    Provisioned,
    ProvisionError,
    ServerFolder,
    add,
    find_server,
    make,
    overview,
    parse_node_config,
    read_site,
    renew_server,
    renew_site,
    revoke,
)
from tepal.tools.deploy.provision.change import changing
from tepal.tools.deploy.provision.folder import fingerprint
from tepal.tools.deploy.provision.site_files import CONTAINER_USER

HOSTS = ["fl.example.org", "192.0.2.7", "2001:db8::7"]


@pytest.fixture
def made(tmp_path) -> Provisioned:
    return make(tmp_path / "fl", hosts=HOSTS, sites=["north", "south"])


def tepal(*arguments):
    """Run `tepal provision …`; returns (exit status, all that it said)."""
    result = CliRunner().invoke(provision, [str(argument) for argument in arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


def tree(folder: Path) -> dict[str, bytes | None]:
    """All paths below a folder; files with what is in them."""
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


def unpack(archive: Path, target: Path) -> Path:
    """Unpack as a person does; return the site's folder."""
    target.mkdir(exist_ok=True)
    subprocess.run(["tar", "-xzf", archive, "-C", target], check=True)
    (site,) = target.iterdir()
    return site


def members(archive: Path) -> dict[str, bytes]:
    with tarfile.open(archive) as tar:
        return {member.name: tar.extractfile(member).read() for member in tar if member.isfile()}


def secret_of(private: bytes) -> list[bytes]:
    """The lines of a private key that nobody else may see."""
    return [line for line in private.splitlines() if len(line) > 30 and b"-----" not in line]


# What is made ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o777])
def test_what_is_secret_is_for_its_owner_alone_whatever_the_umask(tmp_path, umask):
    """Others can open no folder. What is public can be read by the server's user also when root has copied it."""
    before = os.umask(umask)
    try:
        make(tmp_path / "fl", hosts=["localhost"], sites=["north"])
        make(tmp_path / "open", hosts=["localhost"], sites=["north"], unpacked=True)
    finally:
        os.umask(before)
    for path in [tmp_path / "fl", *(tmp_path / "fl").rglob("*"), tmp_path / "open", *(tmp_path / "open").rglob("*")]:
        mode = 0o700 if path.is_dir() else 0o644 if path.suffix in (".pub", ".crt") else 0o600
        assert stat.S_IMODE(path.stat().st_mode) == mode, path


def test_no_file_can_be_read_by_others_at_any_moment(tmp_path, monkeypatch):
    """As each is opened, nothing is in it yet, and its mode is asked of the kernel."""
    seen, fdopen = [], os.fdopen

    def watching(descriptor, *arguments):
        seen.append(stat.S_IMODE(os.fstat(descriptor).st_mode))
        return fdopen(descriptor, *arguments)

    monkeypatch.setattr(os, "fdopen", watching)
    before = os.umask(0)
    try:
        made = make(tmp_path / "fl", hosts=["localhost"], sites=["north"])
    finally:
        os.umask(before)
    assert len(seen) == sum(path.is_file() for path in made.folder.rglob("*"))
    assert set(seen) == {0o600}


def test_the_folders_hold_what_their_machine_needs_and_nothing_else(made):
    assert set(tree(made.folder)) == {
        "deployment.toml", "ca", "ca/ca.crt", "ca/ca.key", "server", "server/ca.crt", "server/server.crt",
        "server/server.key", "server/nodes", "server/nodes/north.pub", "server/nodes/south.pub", "server/revoked",
        "sites", "sites/north.tar.gz", "sites/south.tar.gz",
    }  # fmt: skip
    for name in ("north", "south"):
        assert set(members(made.archive(name))) == {f"{name}/ca.crt", f"{name}/node.key", f"{name}/site.toml"}


def test_every_private_key_is_in_one_place_alone(made):
    secrets = {
        "ca/ca.key": (made.folder / "ca" / "ca.key").read_bytes(),
        "server/server.key": made.server.key.read_bytes(),
        **{f"sites/{name}.tar.gz": members(made.archive(name))[f"{name}/node.key"] for name in ("north", "south")},
    }
    contents = {path: content for path, content in tree(made.folder).items() if content is not None}
    for name in ("north", "south"):
        contents[f"sites/{name}.tar.gz"] = b"\n".join(members(made.archive(name)).values())
    for place, private in secrets.items():
        assert secret_of(private)
        for line in secret_of(private)[1:]:  # OpenSSH's first line says the kind alone
            assert [path for path, content in contents.items() if line in content] == [place]


def test_no_archive_names_another_site_or_holds_its_public_key(made):
    for name, other in (("north", "south"), ("south", "north")):
        public = (made.server.nodes / f"{other}.pub").read_bytes().split()[1]
        for path, content in members(made.archive(name)).items():
            assert other not in path and other.encode() not in content and public not in content


def test_an_archive_that_root_unpacks_belongs_to_the_containers_user(made):
    with tarfile.open(made.archive("north")) as tar:
        for member in tar:
            assert (member.uid, member.gid, member.uname, member.gname) == (CONTAINER_USER, CONTAINER_USER, "", "")
            assert member.mode == (0o700 if member.isdir() else 0o600)
        assert tar.getnames()[0] == "north", "first the folder, so that its mode holds before a file is in it"


def test_a_site_reads_its_unpacked_archive(tmp_path):
    config = {"data": "/data/a b.npz", "partition-id": 3, "rate": 0.5, "fast": True, "a.b": 1, "a.c": "it's"}
    made = make(tmp_path / "fl", hosts=HOSTS, sites=["north"], port=443, node_config=config)
    folder = unpack(made.archive("north"), tmp_path / "there")
    site = read_site(folder)
    assert (site.name, site.superlink, site.node_config) == ("north", "fl.example.org:443", config)
    assert {key: type(value) for key, value in site.node_config.items()} == {k: type(v) for k, v in config.items()}
    assert site.root_certificates.read_bytes() == made.ca_certificate.read_bytes()
    key = load_ssh_private_key(site.key.read_bytes(), None)
    assert isinstance(key.curve, ec.SECP384R1)

    # As `flwr supernode register` reads the public one.
    from flwr.cli.supernode.register import try_load_public_key
    from flwr.supercore.primitives.asymmetric import public_key_to_bytes

    assert try_load_public_key(made.server.nodes / "north.pub") == public_key_to_bytes(key.public_key())


def test_an_unpacked_site_is_what_its_archive_would_unpack_to(tmp_path, made):
    unpacked = make(tmp_path / "open", hosts=HOSTS, sites=["north"], unpacked=True)
    assert not unpacked.archive("north").exists()
    assert tree(unpacked.unpacked("north")).keys() == tree(unpack(made.archive("north"), tmp_path / "there")).keys()
    assert read_site(unpacked.unpacked("north")).name == "north"


@pytest.mark.parametrize(
    ("host", "superlink"),
    [("2001:DB8:0::7", "[2001:db8::7]:9092"), ("[::1]", "[::1]:9092"), ("FL.example.org", "fl.example.org:9092")],
)
def test_sites_call_the_first_host(tmp_path, host, superlink):
    made = make(tmp_path / "fl", hosts=[host, "second"], sites=["north"], unpacked=True)
    assert read_site(made.unpacked("north")).superlink == superlink


@given(st.text(max_size=70) | st.from_regex(r"[A-Za-z0-9._-]{1,66}", fullmatch=True))
@example("..")
@example("a/b")
@example("north\n")
@example("-rf")
@example("é")
@example("x" * 64)
@example("x" * 65)
@example("Server")
@settings(max_examples=20)
def test_a_site_name_is_refused_or_is_that_of_its_file(tmp_path_factory, name):
    folder = tmp_path_factory.mktemp("names")
    allowed = set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_.")
    if 0 < len(name) <= 64 and set(name) <= allowed and name[0] not in ".-" and name.lower() != "server":
        made = make(folder / "fl", hosts=["localhost"], sites=[name])
        assert [path.name for path in (made.folder / "sites").iterdir()] == [f"{name}.tar.gz"]
        assert list(made.server.node_keys()) == [name]
        assert {path.split("/")[0] for path in members(made.archive(name))} == {name}
        assert tomllib.loads(members(made.archive(name))[f"{name}/site.toml"].decode())["name"] == name
        assert revoke(made.server, name) and made.server.revoked_keys()[0][0] == name
    else:
        with pytest.raises(ProvisionError, match="site name"):
            make(folder / "fl", hosts=["localhost"], sites=[name])
        assert not (folder / "fl").exists()
    shutil.rmtree(folder)


def test_the_name_of_the_server_in_reports_is_refused_and_can_still_be_revoked(made):
    """The server refuses it, in any case, when the site introduces itself."""
    assert SERVER == "server"
    with pytest.raises(ProvisionError, match="site name is 'SERVER', which is what reports call the server"):
        add(made.folder, sites=["SERVER"])
    (made.server.nodes / "north.pub").rename(made.server.nodes / "server.pub")
    assert revoke(made.server, "server")


# Whom TLS trusts ------------------------------------------------------------------------------------------------------


def handshake(server: ServerFolder, host: str, *, trust: Path | None = None) -> None:
    """A TLS handshake in memory. Raises ssl.SSLError where the client does not trust the server."""
    theirs = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    theirs.load_cert_chain(server.certificate, server.key)
    ours = ssl.create_default_context(cafile=trust or server.root_certificates)
    ours.verify_flags |= ssl.VERIFY_X509_STRICT  # the default from Python 3.13 on
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    sides = [ours.wrap_bio(down, up, server_hostname=host), theirs.wrap_bio(up, down, server_side=True)]
    while sides:
        for side in list(sides):
            try:
                side.do_handshake()
                sides.remove(side)
            except ssl.SSLWantReadError:
                pass


def chain(server: ServerFolder, subject: x509.DNSName | x509.IPAddress, at: datetime.datetime | None = None):
    """Verify by the rules of the web, which are stricter than TLS libraries; returns the chain."""
    store = Store([x509.load_pem_x509_certificate(server.root_certificates.read_bytes())])
    builder = PolicyBuilder().store(store)
    builder = builder.time(at) if at else builder
    certificate = x509.load_pem_x509_certificate(server.certificate.read_bytes())
    return builder.build_server_verifier(subject).verify(certificate, [])


@pytest.mark.parametrize("host", [*HOSTS, "localhost", "127.0.0.1"])
def test_the_server_is_trusted_under_each_of_its_names_and_on_its_own_machine(made, host):
    handshake(made.server, host)
    try:
        subject = x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        subject = x509.DNSName(host)
    assert len(chain(made.server, subject)) == 2


def test_the_server_is_not_trusted_under_another_name_nor_another_deployments(tmp_path, made):
    for host in ("example.org", "other.example.org", "192.0.2.8"):
        with pytest.raises(ssl.SSLCertVerificationError):
            handshake(made.server, host)
    other = make(tmp_path / "other", hosts=HOSTS, sites=["north"])
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(made.server, HOSTS[0], trust=other.ca_certificate)


def test_certificates_hold_as_long_as_asked_and_for_clocks_that_are_behind(tmp_path):
    made = make(tmp_path / "fl", hosts=HOSTS, sites=["north"], days=10, ca_days=20)
    now, hour, day = datetime.datetime.now(datetime.UTC), datetime.timedelta(hours=1), datetime.timedelta(days=1)
    for good in (now - 0.9 * hour, now + 9.9 * day):
        chain(made.server, x509.DNSName(HOSTS[0]), good)
    for bad in (now - 1.1 * hour, now + 10.1 * day):
        with pytest.raises(VerificationError):
            chain(made.server, x509.DNSName(HOSTS[0]), bad)
    found = overview(made.folder)
    assert (found.server_days, found.ca_days) == (9, 19), "whole days that are left"


def test_the_servers_certificate_can_sign_no_other(made):
    """Else who has the server's key could make a server that sites trust under any name."""
    root, server = (
        x509.load_pem_x509_certificate(path.read_bytes()) for path in (made.ca_certificate, made.server.certificate)
    )
    constraints = root.extensions.get_extension_for_class(x509.BasicConstraints)
    assert constraints.critical and constraints.value == x509.BasicConstraints(ca=True, path_length=0)
    root_key, server_key = (
        load_pem_private_key(path.read_bytes(), None) for path in (made.folder / "ca" / "ca.key", made.server.key)
    )

    def forged(issuer, key):
        own = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "x")])
        builder = x509.CertificateBuilder(issuer.subject, name, own.public_key(), x509.random_serial_number())
        for extension in (
            x509.SubjectAlternativeName([x509.DNSName("elsewhere")]),
            x509.ExtendedKeyUsage([x509.ExtendedKeyUsageOID.SERVER_AUTH]),
            x509.AuthorityKeyIdentifier.from_issuer_public_key(key.public_key()),
        ):
            builder = builder.add_extension(extension, critical=False)
        builder = builder.not_valid_before(server.not_valid_before_utc).not_valid_after(server.not_valid_after_utc)
        return builder.sign(key, hashes.SHA384())

    verifier = PolicyBuilder().store(Store([root])).build_server_verifier(x509.DNSName("elsewhere"))
    assert verifier.verify(forged(root, root_key), []), "by the authority it is good"
    with pytest.raises(VerificationError):
        verifier.verify(forged(server, server_key), [server])


@pytest.mark.skipif(not shutil.which("ssh-keygen"), reason="needs ssh-keygen")
def test_fingerprints_are_those_that_ssh_keygen_shows(tmp_path, made):
    key = unpack(made.archive("north"), tmp_path / "there") / "node.key"
    for path in (made.server.nodes / "north.pub", key):
        said = subprocess.run(["ssh-keygen", "-l", "-f", path], capture_output=True, text=True, check=True).stdout
        assert said.split()[:2] == ["384", fingerprint(made.server.nodes / "north.pub")]


# What is refused ------------------------------------------------------------------------------------------------------

GOOD = {"hosts": ["localhost"], "sites": ["north"]}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"hosts": []}, "no host"),
        ({"hosts": ["https://fl.example.org"]}, "without https:// and port"),
        ({"hosts": ["fl.example.org:9092"]}, "without https:// and port"),
        ({"hosts": ["192.0.2.300"]}, "expected a name or address such as"),
        ({"hosts": ["0.0.0.0"]}, "to which sites cannot connect"),
        ({"hosts": ["::"]}, "to which sites cannot connect"),
        ({"hosts": ["two words"]}, "expected a name or address such as"),
        ({"hosts": [""]}, "expected a name or address such as"),
        ({"hosts": ["*.example.org"]}, "expected a name or address such as"),
        ({"hosts": ["bücher.example"]}, "xn--bcher-kva.example"),
        ({"sites": []}, "no site"),
        ({"sites": ["north", "north"]}, "given twice"),
        ({"sites": ["north", "North"]}, "differ only in case"),
        ({"port": 0}, "port is 0"),
        ({"port": 65536}, "port is 65536"),
        ({"days": 0}, "0 days"),
        ({"days": 20, "ca_days": 10}, "20 days and the authority's for 10"),
        ({"node_config": {"name": "south"}}, "is 'south', expected the site's name"),
        ({"node_config": {"data": [1]}}, r"node config data is \[1\]"),
        ({"node_config": {"data": {"path": "/data"}}}, r"node config data is \{'path'"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_written(tmp_path, change, said):
    with pytest.raises(ProvisionError, match=said):
        make(tmp_path / "fl", **{**GOOD, **change})
    assert list(tmp_path.iterdir()) == []


def test_nothing_that_is_there_is_overwritten(tmp_path, made):
    before = tree(tmp_path)
    with pytest.raises(ProvisionError, match=r"not replaced.*provision add.*provision renew"):
        make(made.folder, **GOOD)
    with pytest.raises(ProvisionError, match=r"site north exists already.*renew .* --site north"):
        add(made.folder, sites=["west", "north"])
    with pytest.raises(ProvisionError, match="site north exists already"):
        add(made.folder, sites=["NORTH"])
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "letter.txt").write_text("dear")
    with pytest.raises(ProvisionError, match=r"is not empty \(letter.txt\)"):
        make(tmp_path / "full", **GOOD)
    with pytest.raises(ProvisionError, match="is not a folder"):
        make(tmp_path / "full" / "letter.txt", **GOOD)
    with pytest.raises(ProvisionError, match="does not exist: "):
        make(tmp_path / "no" / "such", **GOOD)
    shutil.rmtree(tmp_path / "full")
    assert tree(tmp_path) == before
    made.archive("west").write_text("of unknown origin")
    with pytest.raises(ProvisionError, match=r"west\.tar\.gz exists already and is not replaced"):
        add(made.folder, sites=["west"])
    assert made.archive("west").read_text() == "of unknown origin"
    assert "west" not in made.server.node_keys()


def test_an_empty_folder_is_taken_and_closed_to_others(tmp_path):
    """As the place where a volume is mounted."""
    (tmp_path / "fl").mkdir(mode=0o755)
    made = make(tmp_path / "fl", **GOOD)
    assert stat.S_IMODE(made.folder.stat().st_mode) == 0o700


CHANGES = {
    "make": lambda folder: make(folder.parent / "new", hosts=HOSTS, sites=["west", "east"]),
    "make in an empty folder": lambda folder: make(folder.parent / "empty", hosts=HOSTS, sites=["west", "east"]),
    "add": lambda folder: add(folder, sites=["west", "east"]),
    "add unpacked": lambda folder: add(folder, sites=["west", "east"], unpacked=True),
    "renew the server again": lambda folder: renew_server(folder, hosts=["new.example.org"]),
    "renew a site": lambda folder: renew_site(folder, "north"),
    "revoke": lambda folder: revoke(ServerFolder(folder / "server"), "north"),
}


@pytest.mark.parametrize("what", CHANGES)
@pytest.mark.parametrize("call", ["rename", "fdopen"])
def test_a_call_that_fails_in_the_middle_leaves_everything_as_it_was(tmp_path, made, monkeypatch, what, call):
    """It fails at each renaming, and at each file that is written, in turn; the call after it goes through."""
    (tmp_path / "empty").mkdir()
    renew_server(made.folder)  # so that there is an old pair, too
    before, original = tree(tmp_path), getattr(os, call)
    for broken in range(1, 100):
        count = 0

        def failing(*arguments, broken=broken):
            nonlocal count
            count += 1
            if count == broken:
                raise OSError(28, "No space left on device")
            return original(*arguments)

        monkeypatch.setattr(os, call, failing)
        try:
            CHANGES[what](made.folder)
        except OSError as error:
            assert error.errno == 28
            monkeypatch.setattr(os, call, original)
            assert tree(tmp_path) == before
        else:
            break
    assert count == broken - 1
    assert broken > 1 or (what, call) == ("revoke", "fdopen"), "it never failed"
    assert tree(tmp_path) != before


def test_two_calls_at_once_do_not_mix(made):
    with changing(made.folder), pytest.raises(ProvisionError, match="another `tepal provision` is changing"):
        add(made.folder, sites=["west"])
    add(made.folder, sites=["west"])


def test_a_folder_that_is_none_of_ours_is_refused_with_what_to_do(tmp_path):
    for call in (
        lambda: add(tmp_path, sites=["north"]), lambda: renew_server(tmp_path), lambda: renew_site(tmp_path, "north"),
        lambda: overview(tmp_path), lambda: find_server(tmp_path / "no"),
    ):  # fmt: skip
        with pytest.raises(ProvisionError, match="tepal provision make"):
            call()
    assert list(tmp_path.iterdir()) == []


# Further sites, new keys ----------------------------------------------------------------------------------------------


def test_a_further_site_trusts_the_same_server_and_changes_nothing_that_is_there(tmp_path, made):
    before = tree(made.folder)
    add(made.folder, sites=["west"], node_config={"data": "west.npz"})
    after = tree(made.folder)
    assert before.items() <= after.items()
    assert after.keys() - before.keys() == {"server/nodes/west.pub", "sites/west.tar.gz"}
    site = read_site(unpack(made.archive("west"), tmp_path / "there"))
    assert (site.superlink, site.node_config) == ("fl.example.org:9092", {"data": "west.npz"})
    handshake(made.server, "fl.example.org", trust=site.root_certificates)


def test_a_renewed_server_is_trusted_by_the_sites_there_are(tmp_path, made):
    trust = read_site(unpack(made.archive("north"), tmp_path / "there")).root_certificates
    first = (made.server.certificate.read_bytes(), made.server.key.read_bytes())
    renew_server(made.folder, days=30)
    second = (made.server.certificate.read_bytes(), made.server.key.read_bytes())
    assert first[0] != second[0] and first[1] != second[1], "a new key, too"
    for host in [*HOSTS, "localhost", "127.0.0.1"]:
        handshake(made.server, host, trust=trust)
    assert overview(made.folder).server_days == 29
    old = [made.server.folder / name for name in ("server.crt.old", "server.key.old")]
    assert tuple(path.read_bytes() for path in old) == first
    renew_server(made.folder)
    assert tuple(path.read_bytes() for path in old) == second, "the last pair, not the first"
    for path in (old[1], made.server.key):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    for path in (old[0], made.server.certificate):
        assert stat.S_IMODE(path.stat().st_mode) == 0o644
    assert not list(made.folder.glob(".*")), "the first pair is gone"


def test_a_server_that_moves_gets_other_names(tmp_path, made):
    renew_server(made.folder, hosts=["new.example.org", "192.0.2.9"])
    for host in ("new.example.org", "192.0.2.9", "localhost", "127.0.0.1"):
        handshake(made.server, host)
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(made.server, HOSTS[0])
    add(made.folder, sites=["west"])
    assert read_site(unpack(made.archive("west"), tmp_path / "there")).superlink == "new.example.org:9092"


def test_a_server_certificate_does_not_outlive_its_authority(tmp_path):
    made = make(tmp_path / "fl", hosts=HOSTS, sites=["north"], days=5, ca_days=20)
    with pytest.raises(ProvisionError, match="Use --days 19 or less"):
        renew_server(made.folder)
    renew_server(made.folder, days=19)


def test_the_server_cannot_be_renewed_without_the_right_authoritys_key(tmp_path, made):
    other = make(tmp_path / "other", **GOOD)
    key = made.folder / "ca" / "ca.key"
    kept, foreign = key.read_bytes(), (other.folder / "ca" / "ca.key").read_bytes()
    for content, said in ((foreign, "is not the key of"), (b"x", "not a private key")):
        key.write_bytes(content)
        with pytest.raises(ProvisionError, match=said):
            renew_server(made.folder)
    key.unlink()
    with pytest.raises(ProvisionError, match="restore it"):
        renew_server(made.folder)
    key.write_bytes(kept)
    renew_server(made.folder)


@pytest.mark.parametrize("unpacked", [False, True])
@pytest.mark.parametrize("revoked", [False, True])
def test_a_renewed_site_has_another_key_under_its_name_and_all_else_as_before(tmp_path, unpacked, revoked):
    config = {"data": "north.npz", "a.b": 1}
    made = make(tmp_path / "fl", hosts=HOSTS, sites=["north"], node_config=config, unpacked=unpacked)

    def site(where):
        return read_site(made.unpacked("north") if unpacked else unpack(made.archive("north"), tmp_path / where))

    before, public = site("before"), (made.server.nodes / "north.pub").read_bytes()
    key = before.key.read_bytes()
    if revoked:
        revoke(made.server, "north")
        assert made.server.node_keys() == {}
    renew_site(made.folder, "north")
    after = site("after")
    assert (after.name, after.superlink, after.node_config) == ("north", "fl.example.org:9092", config)
    assert after.key.read_bytes() != key
    assert (made.server.nodes / "north.pub").read_bytes() != public
    assert [(name, path.read_bytes()) for name, path in made.server.revoked_keys()] == [("north", public)]
    (old,) = (made.folder / "sites").glob("north-*.old")
    kept = old / "node.key" if unpacked else None
    assert (kept.read_bytes() if kept else members(old)["north/node.key"]) == key

    renew_site(made.folder, "north", node_config={})
    assert site("last").node_config == {}
    assert len(made.server.revoked_keys()) == 2


def test_a_site_whose_archive_is_gone_needs_its_node_config_again(made):
    made.archive("north").unlink()
    with pytest.raises(ProvisionError, match="Give it with --node-config"):
        renew_site(made.folder, "north")
    assert "north" in made.server.node_keys()
    assert tepal("renew", made.folder, "--site", "north", "--node-config", "")[0] == 0
    assert made.archive("north").exists()


def test_a_revoked_name_comes_back_by_renewal_alone(made):
    revoke(made.server, "north")
    with pytest.raises(ProvisionError, match=r"key of site north was revoked.*renew .* --site north"):
        add(made.folder, sites=["north"])
    assert revoke(made.server, "north") is None, "it was before"
    for call in (lambda: revoke(made.server, "west"), lambda: renew_site(made.folder, "west")):
        with pytest.raises(ProvisionError, match="has no site west"):
            call()
    renew_site(made.folder, "north")
    assert list(made.server.node_keys()) == ["north", "south"]


def test_a_server_folder_that_was_copied_without_its_empty_folder_can_revoke(made):
    made.server.revoked.rmdir()
    assert revoke(made.server, "north").parent == made.server.revoked
    assert "north" not in made.server.node_keys() and stat.S_IMODE(made.server.revoked.stat().st_mode) == 0o700


def test_and_renew(made):
    made.server.revoked.rmdir()
    before = made.server.node_keys()["north"].read_bytes()
    renew_site(made.folder, "north")
    assert [path.read_bytes() for path in made.server.revoked.iterdir()] == [before]


def test_names_that_look_like_revoked_files_are_told_apart(tmp_path):
    name = "north-20260101T000000.000000Z"
    made = make(tmp_path / "fl", hosts=HOSTS, sites=["north", name])
    revoke(made.server, name)
    assert [site for site, _ in made.server.revoked_keys()] == [name]


def test_the_overview_shows_each_key_and_when_it_was_revoked(made):
    before = {name: fingerprint(path) for name, path in made.server.node_keys().items()}
    start = datetime.datetime.now(datetime.UTC)
    renew_site(made.folder, "north")
    revoke(made.server, "south")
    found = overview(made.folder)
    assert found.hosts == (*HOSTS, "localhost", "127.0.0.1")
    north, old, south = found.sites
    assert (north.name, old.name, south.name) == ("north", "north", "south")
    assert north.revoked is None and north.fingerprint != before["north"]
    assert (old.fingerprint, south.fingerprint) == (before["north"], before["south"])
    assert start <= old.revoked <= south.revoked <= datetime.datetime.now(datetime.UTC)


# What a site is told --------------------------------------------------------------------------------------------------


def another_kind() -> bytes:
    return ed25519.Ed25519PrivateKey.generate().private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())


def expired() -> bytes:
    key, now, day = ec.generate_private_key(ec.SECP384R1()), datetime.datetime.now(), datetime.timedelta(days=1)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "old")])
    builder = x509.CertificateBuilder(name, name, key.public_key(), 1, now - 9 * day, now - 8 * day)
    return builder.sign(key, hashes.SHA256()).public_bytes(Encoding.PEM)


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("node.key", None, "has no file node.key"),
        ("site.toml", None, "has no file site.toml"),
        ("ca.crt", None, "has no file ca.crt"),
        ("ca.crt", b"nothing", "not a certificate in PEM format"),
        ("ca.crt", expired, "has expired"),
        ("node.key", b"nothing", "not a private key in OpenSSH format"),
        ("node.key", another_kind, "is not an ECDSA key"),
        ("site.toml", b"name = ", "not valid TOML"),
        ("site.toml", b'name = "n"\nsuperlink = "h:1"\nport = 3\n', "unknown key port"),
        ("site.toml", b'superlink = "h:1"\n', "name is None"),
        ("site.toml", b'name = "../n"\nsuperlink = "h:1"\n', "name is '../n'"),
        ("site.toml", b'name = "n"\n', "superlink is None"),
        ("site.toml", b'name = "n"\nsuperlink = "h"\n', "superlink is 'h'"),
        ("site.toml", b'name = "n"\nsuperlink = "https://h:1"\n', "superlink is 'https://h:1'"),
        ("site.toml", b'name = "n"\nsuperlink = "::1:9092"\n', "superlink is '::1:9092'"),
        ("site.toml", b'name = "n"\nsuperlink = "h:1"\nnode-config = 3\n', "expected a table"),
        ("site.toml", b'name = "n"\nsuperlink = "h:1"\n[node-config]\nx = [1]\n', r"x = \[1\] in \[node-config\]"),
        ("site.toml", b'name = "n"\nsuperlink = "h:1"\n[node-config]\nname = "m"\n', "is 'm', expected the site's"),
    ],
)
def test_a_sites_folder_that_is_not_right_is_refused_with_the_file(tmp_path, file, content, said):
    folder = make(tmp_path / "fl", hosts=HOSTS, sites=["north"], unpacked=True).unpacked("north")
    if content is None:
        (folder / file).unlink()
    else:
        (folder / file).write_bytes(content() if callable(content) else content)
    with pytest.raises(ProvisionError, match=said) as refused:
        read_site(folder)
    assert str(folder) in str(refused.value)


@pytest.mark.skipif(not shutil.which("ssh-keygen"), reason="needs ssh-keygen")
def test_a_private_key_with_a_password_is_refused(tmp_path):
    """Nobody is there to type it when a node starts."""
    folder = make(tmp_path / "fl", hosts=HOSTS, sites=["north"], unpacked=True).unpacked("north")
    change = ["ssh-keygen", "-q", "-p", "-P", "", "-N", "secret words", "-f", folder / "node.key"]
    subprocess.run(change, check=True, stdout=subprocess.DEVNULL)
    with pytest.raises(ProvisionError, match="without a password"):
        read_site(folder)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o644, 0o620])
def test_a_private_key_that_others_can_read_is_refused(made, tmp_path, mode):
    folder = unpack(made.archive("north"), tmp_path / "there")
    (folder / "node.key").chmod(mode)
    with pytest.raises(ProvisionError, match=f"mode {mode:04o}.*chmod 600 {folder / 'node.key'}"):
        read_site(folder)


def test_an_archive_that_is_not_unpacked_is_refused_with_how_to(made):
    for path in (made.archive("north"), made.folder / "nowhere"):
        with pytest.raises(ProvisionError, match="tar -xzf"):
            read_site(path)


def test_node_config_is_read_as_flower_reads_it():
    from flwr.common.config import parse_config_args

    for text in ("data='a b.npz' partition-id=3", 'x=true y=0.5 z.w="t"'):
        assert parse_node_config([text]) == parse_config_args([text])
    assert parse_node_config(None) is None and parse_node_config([""]) == {}
    with pytest.raises(ProvisionError, match="--node-config: node config data=x"):
        parse_node_config(["data=x"])


# A SuperLink's keys ---------------------------------------------------------------------------------------------------


class InProcess:
    """A Control API without a process: Flower's own handlers on its own state; errors as its HTTP server answers."""

    def __init__(self):
        from flwr.common.constant import NOOP_FLWR_AID
        from flwr.server.superlink.linkstate import LinkStateFactory
        from flwr.supercore.auth.typing import AccountInfo
        from flwr.supercore.constant import FLWR_IN_MEMORY_DB_NAME
        from flwr.supercore.object_store import ObjectStoreFactory
        from flwr.superlink.federation import NoOpFederationManager

        factory = LinkStateFactory(FLWR_IN_MEMORY_DB_NAME, NoOpFederationManager(), ObjectStoreFactory())
        self.state, self.account = factory.state(), AccountInfo(flwr_aid=NOOP_FLWR_AID, account_name="nobody")
        self.asked = []

    def __getattr__(self, method):
        from flwr.supercore.error import FlowerError
        from flwr.superlink.servicer.control import control_handlers

        handlers = {"ListNodes": "list_nodes", "RegisterNode": "register_node", "UnregisterNode": "unregister_node"}

        def call(request):
            self.asked.append(method)
            try:
                return getattr(control_handlers, handlers[method])(request, self.account, self.state)
            except FlowerError as error:
                response = httpx.Response(400, json=error.to_json(error.message))
            raise httpx.HTTPStatusError("", request=httpx.Request("POST", "http://x"), response=response)

        return call

    @property
    def fleet(self):
        return Fleet("in-process", self)


@pytest.fixture
def superlink():
    return InProcess()


def statuses(superlink):
    return sorted((node.name, node.status) for node in superlink.fleet.node_keys())


def test_registering_again_changes_nothing(made, superlink):
    assert align(superlink.fleet, made.server) == [KeyResult("north", "registered"), KeyResult("south", "registered")]
    superlink.asked.clear()
    assert [told.done for told in align(superlink.fleet, made.server)] == ["was registered before"] * 2
    assert superlink.asked == ["ListNodes"]
    assert statuses(superlink) == [("north", "registered"), ("south", "registered")]


def test_a_superlink_is_brought_into_line_with_what_has_changed(made, superlink):
    align(superlink.fleet, made.server)
    renew_site(made.folder, "north")
    revoke(made.server, "south")
    add(made.folder, sites=["west"])
    told = align(superlink.fleet, made.server)
    gone, new = "its revoked key is unregistered", "registered"
    assert told == [KeyResult(*each) for each in (("north", gone), ("south", gone), ("north", new), ("west", new))]
    assert statuses(superlink) == [
        ("north", "registered"), ("north", "unregistered"), ("south", "unregistered"), ("west", "registered")
    ]  # fmt: skip
    assert align(superlink.fleet, made.server)[0] == KeyResult("north", "was registered before")


def test_one_site_can_be_aligned_alone(made, superlink):
    assert align(superlink.fleet, made.server, "south") == [KeyResult("south", "registered")]
    assert statuses(superlink) == [("south", "registered")]
    align(superlink.fleet, made.server)
    renew_site(made.folder, "north")
    revoke(made.server, "south")
    assert align(superlink.fleet, made.server, "south") == [KeyResult("south", "its revoked key is unregistered")]
    assert statuses(superlink) == [("north", "registered"), ("south", "unregistered")]


def test_a_key_that_another_unregisters_meanwhile_is_no_problem_and_an_unknown_node_is(made, superlink):
    align(superlink.fleet, made.server, "north")
    (node,) = superlink.fleet.node_keys()
    superlink.fleet.unregister(node.node_id)
    superlink.fleet.unregister(node.node_id)
    assert statuses(superlink) == [("north", "unregistered")]
    with pytest.raises(FleetError, match="the SuperLink at in-process refuses"):
        superlink.fleet.unregister(node.node_id + 1)


def test_a_key_that_cannot_be_registered_keeps_no_other_out(made, superlink):
    align(superlink.fleet, made.server, "north")
    superlink.fleet.unregister(superlink.fleet.node_keys()[0].node_id)  # by other hands: the folder does not know
    (made.server.nodes / "bad.pub").write_text("ssh-rsa nothing")
    add(made.folder, sites=["twin", "zebra"])
    shutil.copy(made.server.nodes / "zebra.pub", made.server.nodes / "twin.pub")
    told = {one.site: one for one in align(superlink.fleet, made.server)}
    problem = told["north"].problem
    assert "only after the SuperLink (`tepal server`) is restarted" in problem and "renew" in problem
    assert "bad.pub is not a public key" in told["bad"].problem
    assert told["south"].done == "registered"
    assert told["twin"].done == "registered"
    assert "in use" in told["zebra"].problem
    assert "under another name, 'twin'" in align(superlink.fleet, made.server, "zebra")[0].problem


def test_a_revoked_key_that_is_put_back_is_not_registered(made, superlink):
    gone = revoke(made.server, "north")
    shutil.copy(gone, made.server.nodes / "north.pub")
    told = align(superlink.fleet, made.server, "north")
    assert len(told) == 1 and "among the revoked ones" in told[0].problem
    assert statuses(superlink) == []


def test_who_does_not_answer_or_is_not_trusted_is_said(tmp_path, made):
    with (
        open_fleet(f"127.0.0.1:{free_port()}", made.server.root_certificates) as fleet,
        pytest.raises(Unreachable, match=r"no SuperLink answers at 127\.0\.0\.1"),
    ):
        fleet.node_keys()
    (tmp_path / "ca.crt").write_text("nothing")
    with pytest.raises(ProvisionError, match="not a certificate"), open_fleet("x:1", tmp_path / "ca.crt"):
        pass


@pytest.mark.parametrize(
    ("ssl_says", "words"),
    [
        ("certificate has expired", ["not valid at this machine's time", "check its clock", "renew FOLDER --server"]),
        ("certificate is not yet valid", ["not valid at this machine's time", "check its clock"]),
        ("Hostname mismatch, certificate is not valid for 'x'.", ["not for that name", "tepal provision list FOLDER"]),
        ("IP address mismatch, certificate is not valid for '::1'.", ["not for that name"]),
        ("unable to get local issuer certificate", ["was not issued by this folder's ca.crt"]),
    ],
)
def test_why_a_certificate_is_not_trusted_is_said(ssl_says, words):
    text = f"[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed: {ssl_says} (_ssl.c:1016)"

    def refuse(_):
        raise httpx.ConnectError(text)

    with pytest.raises(Unreachable) as refused:
        Fleet("x:8000", SimpleNamespace(ListNodes=refuse)).node_keys()
    said = str(refused.value)
    assert said.startswith("the certificate of the server at x:8000 ") and said.endswith(f" ({text})")
    assert all(word in said for word in words), said


# The commands ---------------------------------------------------------------------------------------------------------


def test_the_commands_start_without_torch_flower_and_cryptography():
    code = (
        "import sys, tepal.tools.cli.provision\n"
        "print([name for name in ('torch', 'flwr', 'cryptography') if name in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"


def test_the_commands_make_renew_revoke_and_list(tmp_path):
    folder = tmp_path / "fl"
    status, said = tepal(
        "make", folder, "--host", "fl.example.org", "--host", "192.0.2.7", "--site", "north", "--site", "south",
        "--port", 443, "--node-config", "data='/data/x y.npz'", "--node-config", "fast=true",
    )  # fmt: skip
    assert status == 0 and str(folder / "sites" / "north.tar.gz") in said
    site = read_site(unpack(folder / "sites" / "north.tar.gz", tmp_path / "there"))
    assert (site.superlink, site.node_config) == ("fl.example.org:443", {"data": "/data/x y.npz", "fast": True})
    status, said = tepal("add", folder, "--site", "west", "--unpacked")
    assert status == 0 and str(folder / "sites" / "west") in said and "provision register" in said
    assert tepal("renew", folder, "--server", "--site", "north")[0] == 0
    assert tepal("renew", folder)[0] == 1

    here = f"127.0.0.1:{free_port()}"
    status, said = tepal("revoke", folder, "south", "--superlink", here)
    assert status == 1 and "THE KEY IS NOT UNREGISTERED" in said and "revoked in the folder" in said
    assert list(ServerFolder(folder / "server").node_keys()) == ["north", "west"]
    status, said = tepal("register", folder, "--superlink", here)
    assert status == 1 and f"no SuperLink answers at {here}" in said
    status, said = tepal("register", folder, "--superlink", here, "--name", "nobody")
    assert status == 1 and "has no site nobody" in said

    for where in (folder, shutil.copytree(folder / "server", tmp_path / "copy")):
        status, said = tepal("list", where)
        assert status == 0
        for path in [*where.rglob("*.pub")]:
            assert fingerprint(path) in said
        assert said.count("authorised") == 2 and said.count("revoked") == 2
        assert "fl.example.org, 192.0.2.7, localhost, 127.0.0.1" in said
        assert "the server's certificate is valid for 364 more days" in said and "is valid for 3649 more days" in said


def test_commands_that_are_told_have_a_folder_with_spaces_as_one_word(tmp_path):
    folder = tmp_path / "our fleet"
    status, said = tepal("make", folder, "--host", "fl.example.org", "--site", "north", "--unpacked")
    assert status == 0 and f"Then: tepal node --site '{folder / 'sites' / 'north'}'" in said
    status, said = tepal("add", folder, "--site", "west")
    assert status == 0 and f"tepal provision register '{folder}'" in said


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("--days", 30), "--days is for the server's certificate: give --server, too"),
        (("--host", "x"), "--host is for the server's certificate: give --server, too"),
    ],
)
def test_what_is_of_the_servers_certificate_is_refused_without_it(made, given, said):
    before = tree(made.folder)
    status, answer = tepal("renew", made.folder, "--site", "north", *given)
    assert status == 1 and said in answer and tree(made.folder) == before


@pytest.mark.parametrize(("given", "days"), [((), 364), (("--days", 30), 29)])
def test_a_renewed_certificate_of_the_server_is_valid_for_a_year_or_the_days_that_are_given(made, given, days):
    assert tepal("renew", made.folder, "--server", *given)[0] == 0
    assert overview(made.folder).server_days == days


@pytest.mark.parametrize(
    ("given", "lost"),
    [
        ((), ""),
        (("new.example.org",), "192.0.2.7, fl.example.org"),
        (("fl.example.org", "new.example.org"), "192.0.2.7"),
        (("192.0.2.7", "fl.example.org", "new.example.org"), ""),
    ],
)
def test_names_that_the_renewed_certificate_has_no_more_are_told(tmp_path, given, lost):
    folder = make(tmp_path / "fl", hosts=["fl.example.org", "192.0.2.7"], sites=["north"]).folder
    status, said = tepal("renew", folder, "--server", *(word for host in given for word in ("--host", host)))
    assert status == 0 and ("no longer for" in said) == bool(lost)
    if lost:
        assert f"the certificate is no longer for {lost}: sites whose site.toml names one of them" in said


def test_a_certificate_that_cannot_be_read_is_renewed_for_the_names_that_are_given(made):
    made.server.certificate.write_text("nonsense")
    status, said = tepal("renew", made.folder, "--server", "--host", "new.example.org")
    assert status == 0 and "no longer for" not in said and "new.example.org" in overview(made.folder).hosts


def test_revoking_says_that_no_superlink_was_told_when_none_was_named(made, monkeypatch):
    monkeypatch.setattr("tepal.tools.cli.provision._CONTROL", f"127.0.0.1:{free_port()}")
    status, said = tepal("revoke", made.folder, "north")
    assert status == 0 and "THE KEY IS NOT UNREGISTERED" in said and "provision register" in said


def test_certificates_that_end_soon_are_warned_of(tmp_path):
    make(tmp_path / "fl", hosts=HOSTS, sites=["north"], days=20, ca_days=40)
    said = tepal("list", tmp_path / "fl")[1]
    assert "the server's certificate expires in 19 days" in said and "renew FOLDER --server" in said
    assert "authority's certificate ends" not in said


def test_no_command_says_a_private_key(tmp_path, capfd, caplog):
    """Neither when it goes well nor in any refusal, nor in the exception behind it."""
    folder, said = tmp_path / "fl", []
    private_keys: set[bytes] = set()

    def collect():
        for path in tmp_path.rglob("*"):
            if path.name in ("ca.key", "server.key", "server.key.old", "node.key"):
                private_keys.add(path.read_bytes())
            elif ".tar.gz" in path.name:
                private_keys.update(content for name, content in members(path).items() if name.endswith("node.key"))

    def run(*arguments):
        result = CliRunner().invoke(provision, [str(argument) for argument in arguments])
        error = result.exception
        assert error is None or isinstance(error, SystemExit), error
        while error is not None:
            said.append(repr(error))
            error = error.__cause__ or error.__context__
        said.append(result.output)
        collect()

    here = ("--superlink", f"127.0.0.1:{free_port()}")
    run("make", folder, "--host", "localhost", "--site", "north", "--site", "south")
    run("make", folder, "--host", "localhost", "--site", "north")
    run("add", folder, "--site", "west", "--unpacked")
    run("add", folder, "--site", "north")
    run("renew", folder, "--server", "--site", "north", "--site", "west")
    run("list", folder)
    run("register", folder, *here)
    run("revoke", folder, "south", *here)
    shutil.copy(folder / "ca" / "ca.key", folder / "server" / "nodes" / "wrong.pub")  # by mistake
    run("list", folder)
    shutil.copy(folder / "server" / "server.key", folder / "ca" / "ca.key")
    run("renew", folder, "--server")
    shutil.copy(folder / "server" / "server.key", folder / "deployment.toml")
    run("add", folder, "--site", "east")
    site = folder / "sites" / "west"
    for target in ("site.toml", "ca.crt"):
        kept = (site / target).read_bytes()
        shutil.copy(site / "node.key", site / target)
        with pytest.raises(ProvisionError) as refused:
            read_site(site)
        said.append(repr(refused.value))
        (site / target).write_bytes(kept)
    captured = capfd.readouterr()
    everything = "\n".join([*said, captured.out, captured.err, caplog.text])
    assert len(private_keys) >= 8
    for key in private_keys:
        for line in secret_of(key):
            # Also not a part of it, nor its bytes as Python writes them.
            assert line[:24].decode() not in everything or line.startswith(b"b3BlbnNzaC1rZXktdjE")
            assert repr(base64.b64decode(line + b"==")[:12])[2:-1] not in everything
