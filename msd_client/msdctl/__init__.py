"""msd_client.msdctl."""
