"""Every benchmark takes the arguments that ``make bench`` gives it."""

from __future__ import annotations

import argparse
import importlib
import re
import shlex
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BENCHMARKS = sorted(path.stem for path in (ROOT / "benchmarks").glob("bench_*.py"))


class Parsed(Exception):
    """Raised in place of the work."""


@pytest.mark.parametrize("name", BENCHMARKS)
def test_make_bench_gives_arguments_that_are_known(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (given,) = re.findall(r"python \$\$bench (.+); \\", (ROOT / "Makefile").read_text())
    real = argparse.ArgumentParser.parse_args

    def parse(*args: object) -> None:
        raise Parsed(real(*args))  # type: ignore[call-overload]

    monkeypatch.setattr("sys.argv", [name, *shlex.split(given)])
    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse)
    with pytest.raises(Parsed) as parsed:
        importlib.import_module(name).main()
    assert parsed.value.args[0].device == "cpu"
    assert str(parsed.value.args[0].json).endswith("-cpu.json")


def test_the_clicks_are_measured_on_the_cpu_alone(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        importlib.import_module("bench_dlrm").main(["--device", "cuda"])
    assert ended.value.code == 2
    assert "device is 'cuda': this benchmark measures the CPU; leave it out" in capsys.readouterr().err
