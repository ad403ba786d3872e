"""Signals that ask a run to stop: the first is a request, the second acts as usual, ignored ones stay ignored."""

from __future__ import annotations

import signal
import threading

import pytest

from speedswap._process import set_handlers
from speedswap.apps.running import Ended, Stop, ending_signals

SIGNALS = {signal.SIGINT: (130, "interrupted"), signal.SIGTERM: (143, "terminated"), signal.SIGHUP: (129, "hung up")}
pytestmark = pytest.mark.usefixtures("usual_signals")


def handlers():
    return [signal.getsignal(number) for number in SIGNALS]


@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
def test_first_signal_asks_and_second_interrupts(number):
    """The status is what shells have after the signal, and every handler is back afterwards."""
    usual = handlers()
    with ending_signals(), Stop() as stop:
        signal.raise_signal(signal.SIGURG)  # is none of ours
        stop.listen()
        assert not stop.is_set()
        assert stop.status == 0
        signal.raise_signal(number)
        assert stop.is_set()
        assert (stop.status, stop.word) == SIGNALS[number]
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(number)
    assert handlers() == usual


def test_second_signal_may_be_another_one():
    """Ctrl-C that did not seem to help, and then ``kill``."""
    with ending_signals(), Stop() as stop:
        stop.listen()
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(Ended, match="terminated") as ended:
            signal.raise_signal(signal.SIGTERM)
        assert ended.value.signal == signal.SIGTERM
        assert stop.status == 130


@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
def test_what_is_ignored_stays_ignored(number):
    """A background job ignores SIGINT, and ``nohup`` SIGHUP: the user wants the run to continue."""
    signal.signal(number, signal.SIG_IGN)
    with ending_signals(), Stop() as stop:
        stop.listen()
        for _ in range(2):
            signal.raise_signal(number)
        assert not stop.is_set()
        assert signal.getsignal(number) is signal.SIG_IGN
    assert signal.getsignal(number) is signal.SIG_IGN


def test_handlers_of_a_program_around_are_left_to_it():
    """Its own reaction to SIGTERM is not replaced by an exception."""
    came = []
    signal.signal(signal.SIGTERM, lambda number, frame: came.append(number))
    with ending_signals():
        signal.raise_signal(signal.SIGTERM)
    assert came == [signal.SIGTERM]


def test_other_threads_leave_signals_alone():
    """Python lets the main thread alone have handlers."""
    usual, failed = handlers(), []

    def listen():
        try:
            with ending_signals(), Stop() as stop:
                stop.listen()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=listen)
    thread.start()
    thread.join()
    assert failed == []
    assert handlers() == usual


def test_all_handlers_are_set_though_one_that_is_set_raises(monkeypatch):
    """Ctrl-C while handlers are restored: none is left that swallows the next signal."""
    real, left = signal.signal, list(SIGNALS)

    def set_and_deliver(number, handler):
        real(number, handler)
        if number in left:
            left.remove(number)
            signal.raise_signal(number)

    def interrupt(number, frame):
        raise KeyboardInterrupt

    monkeypatch.setattr(signal, "signal", set_and_deliver)
    with pytest.raises(KeyboardInterrupt):
        set_handlers(dict.fromkeys(SIGNALS, interrupt))
    monkeypatch.undo()
    assert handlers() == [interrupt] * 3
