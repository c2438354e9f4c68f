"""Starting the daemons and planners of a cluster, one a node, under somebody else's scheduler."""
