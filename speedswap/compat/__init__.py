"""The predecessors' names, thin, over the rest of the package."""
