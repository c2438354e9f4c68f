"""msd_daemon.shm."""
