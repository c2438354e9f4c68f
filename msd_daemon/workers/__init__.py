"""msd_daemon.workers."""
