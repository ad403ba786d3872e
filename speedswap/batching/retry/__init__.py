"""Functions that shrink their batch, range or chunk when memory runs out, and try again.

As decorators::

    @retry.batch(initial=512)
    def predict(batch_size, model, dataset): ...
    predict(model, dataset)

    @retry.range(initial=256)
    def reduce(start, stop, out, data): ...
    reduce(0, 1024, out, data)

    @retry.chunked(initial=256, join=torch.cat)
    def encode(chunk, start, stop, model): ...
    encode(images, model)

And as calls: ``retry.batch(predict, initial=512)(model, dataset)``.

The size halves on each out-of-memory. A batch starts again; a range, and a tensor's chunks, go on where they failed.
When one sample does not fit, its error is raised, with those of the larger sizes as its causes.

**Sizes are remembered** for each function, place it is called from (or ``key``), and class of free memory. The next
call begins with what fitted, but never with more than its ``initial``, and tries twice as much after ``grow_after``
pieces without a failure. All closures of one definition, and a method of all objects, share what they learn; give
models of different sizes different keys. Functions are not kept alive.

**Side effects stay.** What a piece did before it ran out of memory is not undone, and is done again. So assign rather
than add, ``out[start:stop] = f(chunk)`` rather than ``out += f(chunk)``, or return the piece's result and add up
afterwards (``join=sum``). With ``rng=True`` at least the random numbers of a piece are the same ones in each attempt.

Any number of threads may call these functions. A successful call collects no garbage and takes microseconds.
"""

from speedswap.batching.retry.calls import Retried, RetriedBatch, RetriedChunks, RetriedRange, batch, chunked, range

__all__ = ["Retried", "RetriedBatch", "RetriedChunks", "RetriedRange", "batch", "chunked", "range"]
