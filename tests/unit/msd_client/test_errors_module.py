"""`msd_client.errors` is found without an import of its own, and is complete."""

from __future__ import annotations

import subprocess
import sys

import msd_client.errors
from msd_client.contract import errors as contract


def test_every_error_of_the_contract_can_be_caught_by_name() -> None:
    kinds = {
        name: kind
        for name, kind in vars(contract).items()
        if isinstance(kind, type) and kind.__module__ == contract.__name__
    }
    assert len(kinds) > 30
    assert {name: getattr(msd_client.errors, name) for name in msd_client.errors.__all__} == kinds


def test_errors_are_an_attribute_of_the_package() -> None:
    code = "import msd_client; print(msd_client.errors.NotFoundError.code)"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "not_found"


def test_all_that_the_package_offers_is_there() -> None:
    assert {name for name in msd_client.__all__ if getattr(msd_client, name, None) is None} == set()
