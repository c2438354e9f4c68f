"""msd_daemon.sources."""
