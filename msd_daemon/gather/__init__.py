"""msd_daemon.gather."""
