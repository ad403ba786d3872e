"""A Ctrl-C deferred while rows are written to the tables, or sent to other processes."""

from __future__ import annotations

from speedswap.kernels import _C

__all__ = ["deferred_interrupts"]


class deferred_interrupts(_C.DeferredSignals):
    """Defer a Ctrl-C inside the block to its end, and SIGTERM and SIGHUP if they have handlers.

    Several tables, or weight and state, are then written as a whole. Ignored signals stay ignored, and signals that end
    the process at once, as SIGTERM does by default, still do. In threads other than the main one, which Python does not
    interrupt, this does nothing.
    """
