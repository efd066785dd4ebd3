"""`paceline keys`: makes and shows the keys with which servers and replicas on several machines know each other.

`make` founds an authority (CA) and signs a certificate for each role; what they are for is told in
`paceline/net/secure.py`. Each further machine may get its own, with `--to` into a folder ready to be copied there;
the authority's key never goes along.

Certificates are made by the `cryptography` package, an extra of a few megabytes that only this command needs. The
`openssl` program would do as well where there is one: slim images have none, others have LibreSSL, and what is wrong is
told by an exit code.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import ipaddress
import os
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import msgspec

from paceline.cli import action, whole
from paceline.errors import InvalidInput, SecurityError
from paceline.net.secure import Keys, Role, unit_of, write_secret

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey

ACTIONS = ("make", "server", "client", "show")
ROLES: tuple[Role, ...] = get_args(Role)
DAYS = 365
AUTHORITY_DAYS = 3650
MOST_DAYS = 36500
_P256_ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
SKEW = datetime.timedelta(hours=1)  # how far a clock may be behind ours and still find a new certificate valid

EXAMPLES = """\
examples:
  paceline keys make keys --name node0            a CA, and keys for servers and replicas, in the folder keys
  paceline keys server keys --name node1 --to keys-node1
  paceline keys client keys --name node1 --to keys-node1
                                                  keys for one more machine, in a folder to copy there
  paceline keys client keys --name laptop --to keys-laptop --days 30
                                                  keys for somebody who only trains, for a month
  paceline keys show keys                         who signed what, for which role, until when

Copy a folder by a way you trust (scp), without ca.key: who has that file can sign keys of his own.
exit code of show: 0 if everything there can be used, 1 if not.
"""


class Shown(msgspec.Struct, frozen=True):
    """A certificate, as `show` tells it."""

    file: str
    role: str
    name: str
    signed_by: str
    until: str
    has_key: bool
    wrong: str | None


# ── what can be typed ────────────────────────────────────────────────────────────────────────────────────────


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "paceline keys {make,server,client,show} FOLDER [flags]"
    parser.description = "Make and show the keys with which servers and replicas on several machines know each other."
    parser.epilog = EXAMPLES
    parser.add_argument("action", type=action(ACTIONS), metavar="ACTION", help=f"one of {', '.join(ACTIONS)}")
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="where the CA is, or will be")
    making = parser.add_argument_group("make, server, client")
    making.add_argument("--name", metavar="NAME", help="of the machine or the person the keys are for")
    making.add_argument("--days", type=whole("days", 1), default=DAYS, metavar="N", help=f"valid for, default {DAYS}")
    making.add_argument("--to", type=Path, metavar="FOLDER", help="of server and client: where to put the keys")
    making.add_argument("--force", action="store_true", help="replace keys that are there")
    showing = parser.add_argument_group("show")
    showing.add_argument("--json", action="store_true", help="as JSON")


def execute(options: argparse.Namespace) -> int:
    if importlib.util.find_spec("cryptography") is None:
        raise SecurityError("paceline keys needs the package cryptography: pip install 'paceline[tls]'")
    if options.action == "show":
        return _show(options.folder, as_json=options.json)
    if options.name is None:
        raise SecurityError("--name is missing: give the name of the machine or the person the keys are for")
    if not re.fullmatch(r"[A-Za-z0-9._:-]{1,50}", options.name):
        raise InvalidInput("name", options.name, "give a host name, an address or a word of at most 50 letters")
    if options.days > MOST_DAYS:
        raise InvalidInput("days", options.days, f"give at most {MOST_DAYS}")
    if options.action == "make":
        if options.to is not None:
            raise InvalidInput("to", str(options.to), "make puts everything into FOLDER, leave it out")
        make_keys(options.folder, options.name, days=options.days, force=options.force)
        made, roles = options.folder, ROLES
    else:
        made = options.to or options.folder
        roles = (options.action,)
        make_certificate(options.folder, options.action, options.name, to=made, days=options.days, force=options.force)
    files = ", ".join(f"{role}.pem, {role}.key" for role in roles)
    authority = "ca.pem, ca.key, " if options.action == "make" else ""
    print(f"{authority}{files} are in {made}; paceline keys show {shlex.quote(str(made))} tells about them")
    return 0


# ── making ───────────────────────────────────────────────────────────────────────────────────────────────────


def make_keys(folder: Path, name: str, *, days: int = DAYS, force: bool = False, seed: bytes | None = None) -> None:
    """A new authority, and keys of each role signed by it. `seed`: secret bytes that its key is made of, if not of new
    ones; two authorities of the same seed and name are as good as one."""
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec

    _check_free([folder / f"{stem}.{end}" for stem in ("ca", *ROLES) for end in ("pem", "key")], force)
    _make_folder(folder)
    if seed is None:
        key = ec.generate_private_key(ec.SECP256R1())
    else:
        key = ec.derive_private_key(1 + int.from_bytes(seed, "big") % (_P256_ORDER - 1), ec.SECP256R1())
    subject = _subject(f"paceline CA {name}", "paceline CA")
    until = _now() + datetime.timedelta(days=max(days, AUTHORITY_DAYS))
    builder = _builder(subject, subject, key.public_key(), key.public_key(), until)
    # It may sign certificates but no further authorities.
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    builder = builder.add_extension(_usage(signs_certificates=True), critical=True)
    _write(folder, "ca", _signed(builder, key), key)
    for role in ROLES:
        make_certificate(folder, role, name, to=folder, days=days, force=True)


def make_certificate(folder: Path, role: Role, name: str, *, to: Path, days: int = DAYS, force: bool = False) -> None:
    """Keys of a role, signed by the authority of a folder."""
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import ExtendedKeyUsageOID

    authority, authority_key = _authority(folder)
    elsewhere = to.resolve() != folder.resolve()
    if elsewhere and (to / "ca.pem").exists() and _certificate(to / "ca.pem") != authority and not force:
        raise SecurityError(f"{to} holds keys of another CA: give another folder, or --force to replace them")
    _check_free([to / f"{role}.pem", to / f"{role}.key"], force)
    _make_folder(to)
    key = ec.generate_private_key(ec.SECP256R1())
    until = min(_now() + datetime.timedelta(days=days), authority.not_valid_after_utc)
    subject = _subject(name, unit_of(role))
    builder = _builder(subject, authority.subject, key.public_key(), authority_key.public_key(), until)
    builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    builder = builder.add_extension(_usage(signs_certificates=False), critical=True)
    purpose = ExtendedKeyUsageOID.SERVER_AUTH if role == "server" else ExtendedKeyUsageOID.CLIENT_AUTH
    builder = builder.add_extension(x509.ExtendedKeyUsage([purpose]), critical=True)
    builder = builder.add_extension(x509.SubjectAlternativeName([_general_name(name)]), critical=False)
    if elsewhere:
        write_secret(to / "ca.pem", _pem(authority), 0o644)
    _write(to, role, _signed(builder, authority_key), key)


def _check_free(paths: Sequence[Path], force: bool) -> None:
    for path in paths:
        if os.path.exists(path) and not force:
            raise SecurityError(f"{path} is there already: give another folder, or --force to replace it")


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise SecurityError(f"the folder {folder} cannot be made: {error.strerror}") from error


def _builder(subject: x509.Name, issuer: x509.Name, own: Any, issuers: Any, until: datetime.datetime) -> Any:
    """What every certificate has."""
    from cryptography import x509

    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(own)
        .serial_number(x509.random_serial_number())
        .not_valid_before(_now() - SKEW)
        .not_valid_after(until)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(own), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(issuers), critical=False)
    )


def _signed(builder: x509.CertificateBuilder, key: EllipticCurvePrivateKey) -> x509.Certificate:
    from cryptography.hazmat.primitives import hashes

    return builder.sign(key, hashes.SHA256())


def _subject(name: str, unit: str) -> x509.Name:
    from cryptography import x509
    from cryptography.x509.oid import NameOID

    return x509.Name(
        [
            x509.NameAttribute(NameOID.ORGANIZATIONAL_UNIT_NAME, unit),
            x509.NameAttribute(NameOID.COMMON_NAME, name),
        ]
    )


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    from cryptography import x509

    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _general_name(name: str) -> x509.GeneralName:
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _write(folder: Path, stem: str, certificate: x509.Certificate, key: EllipticCurvePrivateKey) -> None:
    from cryptography.hazmat.primitives import serialization

    data = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    write_secret(folder / f"{stem}.key", data)
    write_secret(folder / f"{stem}.pem", _pem(certificate), 0o644)


def _pem(certificate: x509.Certificate) -> bytes:
    from cryptography.hazmat.primitives import serialization

    return certificate.public_bytes(serialization.Encoding.PEM)


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.timezone.utc)


# ── reading ──────────────────────────────────────────────────────────────────────────────────────────────────


def _authority(folder: Path) -> tuple[x509.Certificate, EllipticCurvePrivateKey]:
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    for path in (folder / "ca.pem", folder / "ca.key"):
        if not path.exists():
            raise SecurityError(f"there is no {path.name} in {folder}: give the folder in which paceline keys make was")
    certificate, path = _certificate(folder / "ca.pem"), folder / "ca.key"
    try:
        key = serialization.load_pem_private_key(path.read_bytes(), password=None)
    except (OSError, ValueError, TypeError) as error:
        raise SecurityError(f"{path} cannot be read, or is not a private key without password in PEM format") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != certificate.public_key():
        raise SecurityError(f"{path} does not belong to ca.pem")
    if certificate.not_valid_after_utc < _now():
        raise SecurityError(f"{folder / 'ca.pem'} has expired: paceline keys make makes a new one")
    return certificate, key


def _certificate(path: Path) -> x509.Certificate:
    from cryptography import x509

    try:
        return x509.load_pem_x509_certificate(path.read_bytes())
    except (OSError, ValueError) as error:
        raise SecurityError(f"{path} cannot be read, or is not a certificate in PEM format") from error


# ── showing ──────────────────────────────────────────────────────────────────────────────────────────────────


def _show(folder: Path, *, as_json: bool) -> int:
    keys = Keys(folder)
    keys.check_folder()
    everyone: tuple[Role | None, ...] = (None, *ROLES)
    shown = [_look_at(keys, role) for role in everyone if (folder / f"{role or 'ca'}.pem").exists()]
    if not shown:
        raise SecurityError(f"there is no certificate in {folder}: paceline keys make {folder} --name HOST makes some")
    if as_json:
        print(msgspec.json.encode(shown).decode())
    else:
        rows = [_row(certificate) for certificate in shown]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        for row in rows:
            print("  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip())
    return 1 if any(certificate.wrong for certificate in shown) else 0


def _look_at(keys: Keys, role: Role | None) -> Shown:
    path = keys.folder / f"{role or 'ca'}.pem"
    certificate = _certificate(path)
    wrong = None
    try:
        if role is None:
            keys.check_authority()
        else:
            keys.check(role)
    except SecurityError as error:
        wrong = str(error)
    return Shown(
        file=path.name,
        role=role or "CA",
        name=_common_name(certificate.subject),
        signed_by=_common_name(certificate.issuer),
        until=certificate.not_valid_after_utc.strftime("%Y-%m-%dT%H:%M:%SZ"),
        has_key=path.with_suffix(".key").exists(),
        wrong=wrong,
    )


def _row(shown: Shown) -> list[str]:
    by = "itself" if shown.role == "CA" and shown.signed_by == shown.name else shown.signed_by
    key = "with its key" if shown.has_key else "without its key"
    wrong = f"wrong: {shown.wrong}" if shown.wrong else ""
    return [shown.file, shown.role, shown.name, f"signed by {by}", f"until {shown.until[:10]}", key, wrong]


def _common_name(name: x509.Name) -> str:
    from cryptography.x509.oid import NameOID

    found = name.get_attributes_for_oid(NameOID.COMMON_NAME)
    return str(found[0].value) if found else name.rfc4514_string()
