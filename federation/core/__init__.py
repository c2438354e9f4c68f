"""State machines of the federation: pure, no I/O, no clock."""
