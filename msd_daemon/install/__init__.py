"""Puts msd in place as a service: units, users, folders, a first configuration."""
