"""The words of a batch of window blocks, for the tests of word2vec."""

from speedswap.apps.word2vec.blocks import BLOCK


def words_of(batch, vocabulary):
    """Return the words of a batch's centers, shape (blocks, BLOCK), and of their contexts."""
    blocks = batch.reach.shape[1]
    centers, contexts = batch.words.cpu().split([blocks * BLOCK, len(batch.words) - blocks * BLOCK])
    assert all(centers < vocabulary)
    assert all(contexts >= vocabulary)
    return centers.view(blocks, BLOCK), contexts.view(blocks, -1) - vocabulary
