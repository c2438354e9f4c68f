"""federation.core."""
