"""Which host the requests to a store are counted at; light, so that the daemon can look there too."""

from __future__ import annotations

import os
from urllib.parse import urlsplit

from msd_daemon.stores.options import StoreOptions
from msd_daemon.stores.urls import WEB_SCHEMES, StoreUrl

HUB_URL = "https://huggingface.co"


def gate_host(place: StoreUrl, options: StoreOptions) -> str:
    """Return the name that the limiter of requests (`stores/limiter.py`) has for a place's host."""
    scheme, host = place.scheme, place.host
    if scheme == "file":
        return "file"
    if scheme in WEB_SCHEMES:
        return host
    endpoint = options.endpoint_of(scheme, host).endpoint
    if scheme == "hf":
        return urlsplit(endpoint or os.environ.get("HF_ENDPOINT") or HUB_URL).netloc
    return urlsplit(endpoint).netloc or f"{scheme}://{host}"
