"""Verbs of msdctl that need sources or planning; installed as entry points `msd.verbs`."""
