"""The web page and the metrics of a node, in a process of their own.

It asks the daemon over its Unix socket as msdctl does; the daemon's loop serves no page.
"""
