"""msd_daemon.core."""
