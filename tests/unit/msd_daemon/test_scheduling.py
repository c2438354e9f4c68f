import subprocess
import sys

from tests.support.sources import ROOT

CODE = """
import os
from msd_daemon.services.scheduling import ask_for_short_slice
was = os.sched_getscheduler(0)
print(ask_for_short_slice() in (True, False), os.sched_getscheduler(0) == was)
print(ask_for_short_slice(slice_ns=2**63) in (True, False))
"""


def test_asking_never_changes_the_policy_and_never_raises():
    shown = subprocess.run(
        [sys.executable, "-c", CODE], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert shown.stdout.split() == ["True", "True", "True"]
