"""federation.planning."""
