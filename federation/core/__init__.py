"""State machines of the federation. Pure: no sockets, no clock; times come in as arguments."""
