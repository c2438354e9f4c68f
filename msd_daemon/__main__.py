"""`python -m msd_daemon`."""

from msd_daemon.app import main

main()
