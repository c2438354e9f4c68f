"""msd_client."""
