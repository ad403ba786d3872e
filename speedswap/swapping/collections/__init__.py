"""Many tables in one step: their rows in one store, one lookup, one parameter and one scatter.

:class:`EmbeddingBagCollection` and :class:`EmbeddingCollection` are configured and called as TorchRec's;
docs/design/collections.md says how the tables lie together.
"""
