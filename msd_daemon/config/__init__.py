"""msd_daemon.config."""
