"""Key files: their form, how they are read, written, made, replaced and revoked.

A file is TOML and may list `former` keys beside the present one, each with the end of its grace.
federation.keys says which files a folder holds and what is accepted by them.
"""

from __future__ import annotations

import datetime as dt
import hashlib
import os
import re
import stat
import tomllib
from dataclasses import dataclass, field
from pathlib import Path

from federation.secure_sockets import CurveKeys
from msd_client.contract.errors import ConfigError
from msd_client.contract.plain import decode_plain

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
KEY_BYTES = 40
FILE_BYTES_MAX = 16 << 10
PUBLIC, SECRET, REVOKED = ".pub", ".secret", ".revoked"
_Z85 = re.compile(r"[0-9A-Za-z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")


@dataclass(frozen=True)
class FormerKey:
    """A key that was replaced."""

    key: str
    until: dt.datetime
    """End of its grace, by this machine's clock."""
    secret: str = ""


@dataclass(frozen=True)
class KeyFile:
    """What stands in a file."""

    key: str
    made: dt.datetime | None = None
    secret: str = ""
    former: list[FormerKey] = field(default_factory=list)

    def keys_at(self, now: dt.datetime) -> list[str]:
        """Return the public keys that are accepted then, the present one first."""
        return [self.key, *(one.key for one in self.former if now < one.until)]

    def pairs_at(self, now: dt.datetime) -> list[CurveKeys]:
        """Return the key pairs that are in use then, the present one first."""
        found = [(self.key, self.secret)]
        found += [(one.key, one.secret) for one in self.former if now < one.until]
        return [CurveKeys(public.encode(), secret.encode()) for public, secret in found]


def utc_now() -> dt.datetime:
    """Return the time that graces are compared with."""
    return dt.datetime.now(dt.UTC)


def check_name(name: str) -> str:
    """Return a name that may be a node's or planner's.

    Raises:
        ConfigError: It may not.
    """
    if not NAME.fullmatch(name):
        raise ConfigError(
            f"name {name!r}: a node or planner is named by 1 to 64 letters, digits, '.', '_' and '-', "
            "the first one a letter or digit"
        )
    return name


def fingerprint(key: str) -> str:
    """Return 8 hexadecimal digits that name a public key for people."""
    return hashlib.sha256(key.encode()).hexdigest()[:8]


def read_key_file(path: Path) -> KeyFile:
    """Return what a file holds.

    Raises:
        ConfigError: It can't be read, is no key file, or a secret one that others may read.
    """
    try:
        with path.open("rb") as file:
            if path.suffix == SECRET:
                _check_secret(path, os.fstat(file.fileno()))
            content = file.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}", path=str(path)) from error
    if len(content) > FILE_BYTES_MAX:
        raise ConfigError(f"{path}: larger than {FILE_BYTES_MAX} bytes: no key file of msd")
    try:
        found = decode_plain(KeyFile, tomllib.loads(content.decode()), path.name)
    except (ConfigError, ValueError) as error:
        raise ConfigError(f"{path}: not a key file of msd: {error}", path=str(path)) from error
    pairs = [(found.key, found.secret), *((one.key, one.secret) for one in found.former)]
    for key, secret in pairs:
        if not _Z85.fullmatch(key) or (secret and not _Z85.fullmatch(secret)):
            raise ConfigError(f"{path}: a key has {KEY_BYTES} characters of Z85", path=str(path))
        if bool(secret) != (path.suffix == SECRET):
            raise ConfigError(f"{path}: secrets belong into {SECRET} files, and only there")
    if any(one.until.tzinfo is None for one in found.former):
        raise ConfigError(f"{path}: `until` needs its zone: 2026-11-30T10:00:00Z", path=str(path))
    return found


def _check_secret(path: Path, found: os.stat_result) -> None:
    mode = stat.S_IMODE(found.st_mode)
    if mode & 0o077 or found.st_uid not in (os.geteuid(), 0):
        raise ConfigError(
            f"{path}: mode {mode:04o}, owner {found.st_uid}: a secret key is readable by its owner "
            f"alone: chown {os.geteuid()} and chmod 600",
            path=str(path),
        )


def write_key_file(path: Path, what: str, keys: KeyFile) -> None:
    """Write a key file whole, secret ones with mode 0600 from the first byte on.

    Raises:
        ConfigError: It can't be written; what was there before still is.
    """
    lines = [f"# msd {what}", f'key = "{keys.key}"']
    if keys.secret:
        lines.append(f'secret = "{keys.secret}"')
    if keys.made is not None:
        lines.append(f"made = {keys.made:%Y-%m-%dT%H:%M:%SZ}")
    for former in keys.former:
        lines += ["", "[[former]]", f'key = "{former.key}"']
        if former.secret:
            lines.append(f'secret = "{former.secret}"')
        lines.append(f"until = {former.until:%Y-%m-%dT%H:%M:%SZ}")
    mode = 0o600 if path.suffix == SECRET else 0o644
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode)
        try:
            with open(descriptor, "w", encoding="ascii") as file:
                file.write("\n".join(lines) + "\n")
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}", path=str(path)) from error


def generate(folder: Path, name: str) -> KeyFile:
    """Make a key pair and write both files of it; return the public one.

    Raises:
        ConfigError: The name has keys already, or they can't be written.
    """
    check_name(name)
    for suffix in (SECRET, PUBLIC):
        path = folder / f"{name}{suffix}"
        if path.exists():
            raise ConfigError(
                f"{path} exists: `msdctl keys rotate {name}` replaces it with a grace for the old key, "
                f"`msdctl keys revoke {name}` without one",
                path=str(path),
            )
    return _write_pair(folder, name, _new_pair(), [])


def rotate(folder: Path, name: str, grace: dt.timedelta, now: dt.datetime) -> KeyFile:
    """Replace a key pair; the one before is accepted until the grace ends. Return the public file.

    Raises:
        ConfigError: The secret is not here, or files can't be written.
    """
    check_name(name)
    path = folder / f"{name}{SECRET}"
    if not path.exists():
        raise ConfigError(
            f"{path} is not there: rotate on the machine that holds the secret", path=str(path)
        )
    old = read_key_file(path)
    until = (now + grace).replace(microsecond=0)
    former = [FormerKey(old.key, until, old.secret)] if grace else []
    former += [one for one in old.former if grace and now < one.until]
    return _write_pair(folder, name, _new_pair(), former)


def revoke(folder: Path, name: str) -> list[Path]:
    """Take a name's keys off the list for good; return the files that note them.

    Raises:
        ConfigError: No such name is listed, or files can't be written.
    """
    check_name(name)
    path = folder / f"{name}{PUBLIC}"
    if not path.exists():
        raise ConfigError(f"{path} is not there: `msdctl keys list` names who is listed")
    found = read_key_file(path)
    noted = []
    for key in (found.key, *(one.key for one in found.former)):
        note = folder / f"{name}-{fingerprint(key)}{REVOKED}"
        write_key_file(note, f"key of {name}, never accepted again", KeyFile(key))
        noted.append(note)
    # Last: a crash before leaves a key that is listed and revoked, which is revoked.
    for suffix in (PUBLIC, SECRET):
        (folder / f"{name}{suffix}").unlink(missing_ok=True)
    return noted


def _new_pair() -> CurveKeys:
    import zmq

    return CurveKeys(*zmq.curve_keypair())


def _write_pair(folder: Path, name: str, pair: CurveKeys, former: list[FormerKey]) -> KeyFile:
    """Write both files, the public one first: a peer that knows both keys is never shut out."""
    made = utc_now().replace(microsecond=0)
    key, secret = pair.public.decode(), pair.secret.decode()
    public = KeyFile(key, made, "", [FormerKey(one.key, one.until) for one in former])
    what = f"public key of {name}: copy it to the keys_dir of its peers"
    write_key_file(folder / f"{name}{PUBLIC}", what, public)
    both = KeyFile(key, made, secret, former)
    write_key_file(folder / f"{name}{SECRET}", f"secret key of {name}: copy it nowhere", both)
    return public
