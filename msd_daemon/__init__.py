"""msd_daemon."""
