"""msd_client.contract."""
