"""Pages that are made from the code are what the code makes now."""

from __future__ import annotations

from msd_client.contract.error_page import error_classes, error_page
from msd_client.contract.errors import MsdError, _all_errors
from tests.support.sources import ROOT


def test_the_catalogue_of_errors_is_current() -> None:
    written = (ROOT / "docs/errors.md").read_text(encoding="utf-8")
    assert written == error_page(), "run python -m msd_client.contract.error_page docs/errors.md"


def test_every_error_stands_in_it_with_a_meaning_and_a_code_of_its_own() -> None:
    classes = list(error_classes())
    codes = [kind.code for kind in classes]
    assert len(set(codes)) == len(codes)
    known = {
        kind for kind in _all_errors(MsdError).values() if kind.__module__ == MsdError.__module__
    }
    assert known == {*classes, MsdError}
    assert all(kind.__doc__ for kind in classes)
