"""`python -m msd_daemon.dashboard`."""

import sys

from msd_daemon.dashboard.main import main

sys.exit(main())
