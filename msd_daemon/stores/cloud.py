"""S3, GCS and Azure through obstore: credentials, signatures, listings; its own retries are off."""

from __future__ import annotations

import configparser
import datetime as dt
import os
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from msd_client.contract.errors import ConfigError
from msd_daemon.stores.answers import (
    FailureKind,
    ObjectInfo,
    RangeAnswer,
    RequestFailure,
    clean_validator,
    kind_of_status,
)
from msd_daemon.stores.http_client import HttpClient
from msd_daemon.stores.options import EndpointOptions, StoreOptions
from msd_daemon.stores.web import WebTransport

SIGNED_FOR = dt.timedelta(minutes=15)
PROFILE_KEPT_FOR = dt.timedelta(minutes=5)
LIST_PAGE_OBJECTS = 1000
_OBSTORE_FAULTS = (Exception,)
"""obstore's own classes and built-in ones (OSError, ValueError), all classed by `failure_of`."""
_WIRE_WORDS = ("HttpError", "reqwest::Error", "hyper::Error", "TimedOut")
_STATUS = re.compile(r"status code: (\d{3})\b")
_CODE = re.compile(r"<Code>([A-Za-z0-9]{1,64})</Code>")


class CloudTransport:
    """A bucket read, listed and asked through obstore.

    Args:
        store: An obstore store whose retries are off.
        is_paged: Whether it can list from a key on; else a listing is one page.
    """

    def __init__(self, store: Any, *, is_paged: bool = True) -> None:
        self._store = store
        self._is_paged = is_paged
        self._obstore = obstore_modules()[0]

    def read(self, key: str, begin: int, end: int) -> RangeAnswer:
        """Return the bytes [begin, end) of an object, fewer only at its end."""
        try:
            result = self._obstore.get(self._store, key, options={"range": (begin, end)})
            meta, (first, last) = result.meta, result.range
            body = bytes(result.bytes())
        except _OBSTORE_FAULTS as error:
            raise failure_of(error) from None
        if first != begin or last != min(end, meta["size"]) or len(body) != last - first:
            raise RequestFailure(
                FailureKind.TRANSIENT,
                f"bytes {begin} to {end} were asked for, {len(body)} came from {first} on",
            )
        return RangeAnswer(body, meta["size"], clean_validator(meta["e_tag"]))

    def stat(self, key: str) -> ObjectInfo:
        """Return an object's size and ETag."""
        try:
            return _info(self._obstore.head(self._store, key))
        except _OBSTORE_FAULTS as error:
            raise failure_of(error) from None

    def write(self, key: str, content: bytes) -> None:
        """Put an object, whole or not at all."""
        try:
            self._obstore.put(self._store, key, content, use_multipart=False)
        except _OBSTORE_FAULTS as error:
            raise failure_of(error) from None

    def list_page(self, folder: str, token: str) -> tuple[list[ObjectInfo], str | None]:
        """Return up to a thousand objects below a folder; the token is the last key before them."""
        try:
            stream = self._obstore.list(
                self._store, folder or None, offset=token or None, chunk_size=LIST_PAGE_OBJECTS
            )
            metas = next(iter(stream), []) if self._is_paged else stream.collect()
        except _OBSTORE_FAULTS as error:
            raise failure_of(error) from None
        page = [_info(meta) for meta in metas]
        is_last = not self._is_paged or len(page) < LIST_PAGE_OBJECTS
        return page, None if is_last else page[-1].key


class S3Transport:
    """A bucket whose objects are read with signed URLs: answers show Retry-After, and cost less."""

    def __init__(self, client: HttpClient, bucket: str, options: StoreOptions) -> None:
        endpoint = options.endpoint_of("s3", bucket)
        store = s3_store(bucket, endpoint, options)
        self._cloud = CloudTransport(store)
        self._signer = store
        self._is_anonymous = endpoint.is_anonymous
        if endpoint.is_anonymous:
            # Its URLs without their signature are those of an unsigned request.
            self._signer = s3_store(bucket, endpoint, options, is_unsigned_signer=True)
        self._web = WebTransport(client, self._url_of, follows=False)
        self._obstore = obstore_modules()[0]

    def read(self, key: str, begin: int, end: int) -> RangeAnswer:
        """Return the bytes [begin, end) of an object, fewer only at its end."""
        return self._web.read(key, begin, end)

    def stat(self, key: str) -> ObjectInfo:
        """Return an object's size and ETag."""
        return self._web.stat(key)

    def write(self, key: str, content: bytes) -> None:
        """Put an object, whole or not at all."""
        self._cloud.write(key, content)

    def list_page(self, folder: str, token: str) -> tuple[list[ObjectInfo], str | None]:
        """Return up to a thousand objects below a folder."""
        return self._cloud.list_page(folder, token)

    def _url_of(self, method: str, key: str) -> str:
        try:
            url = str(self._obstore.sign(self._signer, method, key, SIGNED_FOR))
        except _OBSTORE_FAULTS as error:
            raise failure_of(error) from None
        return url.partition("?")[0] if self._is_anonymous else url


@cache
def obstore_modules() -> tuple[Any, Any]:
    """Import obstore once, at the first bucket; it starts threads at its first request.

    Raises:
        ConfigError: It is not installed.
    """
    try:
        import obstore
        import obstore.store
    except ImportError as error:
        raise ConfigError("s3, gs and az need the package obstore: install msd[daemon]") from error
    return obstore, obstore.store


def s3_store(
    bucket: str,
    endpoint: EndpointOptions,
    options: StoreOptions,
    *,
    is_unsigned_signer: bool = False,
    environ: Mapping[str, str] = os.environ,
) -> Any:
    """Return an obstore store of an S3 bucket.

    Raises:
        ConfigError: A variable that should hold a credential is not set.
    """
    settings: dict[str, Any] = {}
    if endpoint.endpoint:
        settings["endpoint"] = endpoint.endpoint
    region = endpoint.region or environ.get("AWS_REGION") or environ.get("AWS_DEFAULT_REGION")
    if is_unsigned_signer:
        settings |= {"access_key_id": "unsigned", "secret_access_key": "unsigned"}
    elif endpoint.is_anonymous:
        settings["skip_signature"] = True
    elif endpoint.access_key_env:
        settings["access_key_id"] = _from_env("access_key_env", endpoint.access_key_env, environ)
        settings["secret_access_key"] = _from_env(
            "secret_key_env", endpoint.secret_key_env, environ
        )
        if endpoint.session_token_env:
            settings["session_token"] = _from_env(
                "session_token_env", endpoint.session_token_env, environ
            )
    elif (profile := _profile(endpoint, environ)) is not None:
        settings["credential_provider"] = profile.credentials
        region = region or profile.region()
    settings["region"] = region or "us-east-1"
    return obstore_modules()[1].S3Store(bucket, **settings, **_client_settings(endpoint, options))


def gcs_store(bucket: str, endpoint: EndpointOptions, options: StoreOptions) -> Any:
    """Return an obstore store of a GCS bucket.

    Raises:
        ConfigError: A variable that should hold a token is not set.
    """
    settings: dict[str, Any] = {}
    if endpoint.endpoint:
        settings["base_url"] = endpoint.endpoint
    if endpoint.is_anonymous:
        settings["skip_signature"] = True
    elif endpoint.token_env:
        settings["bearer_token"] = _from_env("token_env", endpoint.token_env, os.environ)
    return obstore_modules()[1].GCSStore(bucket, **settings, **_client_settings(endpoint, options))


def azure_store(container: str, endpoint: EndpointOptions, options: StoreOptions) -> Any:
    """Return an obstore store of an Azure container.

    Raises:
        ConfigError: A variable that should hold a key is not set.
    """
    settings: dict[str, Any] = {}
    if endpoint.account:
        settings["account_name"] = endpoint.account
    if endpoint.endpoint:
        settings["endpoint"] = endpoint.endpoint
    if endpoint.is_anonymous:
        settings["skip_signature"] = True
    elif endpoint.access_key_env:
        settings["account_key"] = _from_env("access_key_env", endpoint.access_key_env, os.environ)
    kind = obstore_modules()[1].AzureStore
    return kind(container, **settings, **_client_settings(endpoint, options))


def failure_of(error: Exception) -> RequestFailure:
    """Return what an obstore error asks for.

    Its text holds URLs, which may be signed, and bodies: status and code alone go on.
    """
    text = str(error)
    found, code = _STATUS.search(text), _CODE.search(text)
    if found is not None:
        name = "" if code is None else code.group(1)
        status = int(found.group(1))
        kind = kind_of_status(status, name)
        return RequestFailure(kind, f"HTTP {status}" + (f" {name}" if name else ""))
    if isinstance(error, FileNotFoundError):
        return RequestFailure(FailureKind.MISSING, "not found")
    kind_name = type(error).__name__
    if kind_name in ("PermissionDeniedError", "UnauthenticatedError"):
        return RequestFailure(FailureKind.DENIED, kind_name)
    if "redential" in text:
        return RequestFailure(FailureKind.DENIED, "no credentials were found")
    if kind_name == "GenericError" and any(word in text for word in _WIRE_WORDS):
        return RequestFailure(FailureKind.TRANSIENT, "the connection failed")
    return RequestFailure(FailureKind.REFUSED, f"the answer is not understood ({kind_name})")


def _client_settings(endpoint: EndpointOptions, options: StoreOptions) -> dict[str, Any]:
    return {
        "client_options": {
            "allow_http": endpoint.endpoint.startswith("http://"),
            "connect_timeout": dt.timedelta(seconds=options.connect_timeout_s),
            "read_timeout": dt.timedelta(seconds=options.read_timeout_s),
            "timeout": dt.timedelta(seconds=4 * options.read_timeout_s),
        },
        "retry_config": {
            "max_retries": 0,
            "retry_timeout": dt.timedelta(seconds=options.read_timeout_s),
        },
    }


def _info(meta: Mapping[str, Any]) -> ObjectInfo:
    return ObjectInfo(meta["path"], meta["size"], clean_validator(meta["e_tag"]))


def _from_env(key: str, name: str, environ: Mapping[str, str]) -> str:
    value = environ.get(name, "")
    if not value:
        raise ConfigError(
            f"stores.endpoints: {key} names the variable {name!r}, which is not set for the daemon: "
            "set it before the daemon starts, or name another one"
        )
    return value


class AwsProfile:
    """A profile of the AWS credentials file, read again as its keys may be short-lived."""

    def __init__(self, name: str, environ: Mapping[str, str]) -> None:
        self._name = name
        home = Path(environ.get("HOME", "/"))
        self._file = Path(environ.get("AWS_SHARED_CREDENTIALS_FILE") or home / ".aws/credentials")
        self._config = Path(environ.get("AWS_CONFIG_FILE") or home / ".aws/config")

    def is_there(self) -> bool:
        """Tell whether the credentials file holds keys of the profile."""
        return bool(self._section(self._file, self._name).get("aws_access_key_id"))

    def region(self) -> str:
        """Return the profile's region, or nothing."""
        name = self._name if self._name == "default" else f"profile {self._name}"
        return self._section(self._config, name).get("region", "")

    def credentials(self) -> dict[str, Any]:
        """Return the keys as obstore takes them.

        Raises:
            ConfigError: The file no longer holds them.
        """
        found = self._section(self._file, self._name)
        if not found.get("aws_access_key_id") or not found.get("aws_secret_access_key"):
            raise ConfigError(f"{self._file} has no keys of the profile {self._name!r}: add them")
        return {
            "access_key_id": found["aws_access_key_id"],
            "secret_access_key": found["aws_secret_access_key"],
            "token": found.get("aws_session_token"),
            "expires_at": dt.datetime.now(dt.UTC) + PROFILE_KEPT_FOR,
        }

    def _section(self, file: Path, name: str) -> dict[str, str]:
        parser = configparser.RawConfigParser()
        try:
            parser.read(file, encoding="utf-8")
        except (configparser.Error, OSError, UnicodeDecodeError):
            return {}
        return dict(parser[name]) if parser.has_section(name) else {}


def _profile(endpoint: EndpointOptions, environ: Mapping[str, str]) -> AwsProfile | None:
    """Return the profile that is named, or the default one where the environment has no keys.

    Raises:
        ConfigError: The named profile is not there.
    """
    if endpoint.profile_env:
        name = _from_env("profile_env", endpoint.profile_env, environ)
    elif environ.get("AWS_ACCESS_KEY_ID"):
        return None
    else:
        name = environ.get("AWS_PROFILE", "")
    profile = AwsProfile(name or "default", environ)
    if profile.is_there():
        return profile
    if name:
        raise ConfigError(
            f"the AWS profile {name!r} has no keys in the credentials file: add them, or name another"
        )
    return None
