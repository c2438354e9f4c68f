"""The coordination store of planners: who leads, what is open, and every job's journal."""
