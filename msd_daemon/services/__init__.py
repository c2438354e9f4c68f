"""msd_daemon.services."""
