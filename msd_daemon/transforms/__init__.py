"""msd_daemon.transforms."""
