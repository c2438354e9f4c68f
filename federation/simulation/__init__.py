"""A job's planning without its data: length statistics in, plans and predictions out. Pure."""
