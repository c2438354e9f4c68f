"""What a run did, read from its journal and its sources: lineage, find, verify, mid-stream starts."""
