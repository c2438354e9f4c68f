"""federation.model."""
