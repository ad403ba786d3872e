"""The standing attack: a few rounds of each attack hold, and broken promises are found, named and counted."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from torture.attack import Attack, Broken, Skipped, attacks
from torture.processes import child
from torture.run import Plan, as_json, as_table, play, round_seed

pytestmark = pytest.mark.release

ROOT = Path(__file__).resolve().parent.parent
SEED = 2_025


@pytest.fixture(scope="module")
def slice_of_all(tmp_path_factory) -> dict[str, dict]:
    """A few rounds of every attack, as the command plays them."""
    report = tmp_path_factory.mktemp("torture") / "report.json"
    words = [sys.executable, "-m", "torture", "--quick", "--seed", str(SEED), "--json", str(report)]
    env = {**os.environ, "PYTHONPATH": str(ROOT / "tools"), "OMP_WAIT_POLICY": "passive"}
    done = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert report.exists(), done.stdout + done.stderr
    return json.loads(report.read_text())["attacks"]


@pytest.mark.slow
@pytest.mark.parametrize("attack", attacks(), ids=lambda attack: attack.name)
def test_promise_holds_under_attack(slice_of_all, attack):
    """Every finding has a seed, with which the round can be played again."""
    result = slice_of_all[attack.name]
    assert not result["findings"], "\n".join(
        f"--repeat {attack.name}:{finding['seed']}\n{finding['text']}" for finding in result["findings"]
    )
    if result["skipped"]:
        pytest.skip("; ".join(result["skipped"]))
    assert result["rounds"] == attack.quick


def _found(round_, **options):
    attack = Attack(name="this", promise="it holds", round=round_, **{"seconds": 20.0, **options})
    results = play(Plan([attack], seed=1, rounds={"this": 3}))
    return results[0], as_json(results, Plan([attack], seed=1))["attacks"]["this"], as_table(results)


def _crashes_every_second_round(seed: int, folder: Path) -> str:
    if seed == round_seed(1, "this", 2):
        os.kill(os.getpid(), signal.SIGSEGV)
    return "survived"


def test_crash_is_a_finding_and_the_rounds_go_on():
    """The stack of the crash is part of the finding."""
    result, report, table = _found(_crashes_every_second_round)
    assert result.kinds == {"survived": 2}
    (finding,) = result.findings
    assert (finding.how, finding.number, finding.seed) == ("crash", 2, round_seed(1, "this", 2))
    assert "SIGSEGV" in finding.text
    assert "_crashes_every_second_round" in finding.text
    assert report["findings"][0]["seed"] == finding.seed
    assert "3 rounds, 1 findings" in table


def _hangs(seed: int, folder: Path) -> str:
    time.sleep(60)
    return "never"


def test_hang_is_a_finding_with_the_stack_where_it_hangs():
    """It is waited for only as long as the attack says."""
    result, _, _ = _found(_hangs, seconds=0.2)
    assert [finding.how for finding in result.findings] == ["hang"] * 3
    assert "in _hangs" in result.findings[0].text


def _breaks(seed: int, folder: Path) -> str:
    if not list(folder.iterdir()):
        (folder / "left").mkdir(mode=0)
        raise Broken(f"row {seed} is lost\nand {folder} is to blame")
    return "folder was not empty"


def test_findings_of_one_cause_are_counted_together_and_each_can_be_repeated(capsys):
    """Numbers and paths in the first line make no difference; every round has an empty folder."""
    result, _, table = _found(_breaks)
    assert len(result.findings) == 3
    assert "this: 3 × broken: row # is lost" in table
    said = capsys.readouterr().out
    assert all(f"--repeat this:{finding.seed}" in said for finding in result.findings)
    assert said.count("is to blame") == 1


def _raises(seed: int, folder: Path) -> str:
    raise OSError(28, "No space left on device")


def test_unexpected_error_is_a_finding():
    """Attacks name the errors that are allowed; any other is a finding."""
    result, _, _ = _found(_raises)
    assert [finding.how for finding in result.findings] == ["error"] * 3
    assert "OSError: [Errno 28]" in result.findings[0].text


def _skips(seed: int, folder: Path) -> str:
    raise Skipped("needs a disk")


def test_round_that_cannot_be_played_is_counted_with_its_reason():
    """It is neither a finding nor a promise that held."""
    result, report, table = _found(_skips)
    assert (len(result.findings), result.kinds, report["skipped"]) == (0, {}, {"needs a disk": 3})
    assert "skipped 3 times: needs a disk" in table


def _draws(seed: int, folder: Path) -> str:
    return str(random.Random(seed).randrange(10**9))


def test_seed_decides_every_round():
    """The same seed plays the same rounds, another seed plays others."""
    attack = Attack(name="this", promise="it holds", round=_draws)
    first, again, other = (play(Plan([attack], seed=seed, rounds={"this": 4}))[0].kinds for seed in (5, 5, 6))
    assert len(first) == 4
    assert first == again
    assert not set(first) & set(other)
    repeated = play(Plan([attack], seed=9, rounds={"this": 2}, repeated=round_seed(5, "this", 3)))[0].kinds
    assert list(repeated.values()) == [2]
    assert set(repeated) < set(first)


def _counts(seed: int, folder: Path) -> dict[str, int]:
    return {"states": 5, "lives": 2}


def test_round_may_count_several_things():
    result, _, table = _found(_counts)
    assert result.kinds == {"states": 15, "lives": 6}
    assert "states 15" in table


def _slow(seed: int, folder: Path) -> str:
    time.sleep(0.2)
    return "slow"


def _fast(seed: int, folder: Path) -> str:
    time.sleep(0.02)
    return "fast"


def test_time_is_divided_fairly():
    """An attack with long rounds plays fewer of them."""
    slow, fast = play(
        Plan([Attack("slow", "", _slow), Attack("fast", "", _fast)], seed=1, seconds=2.0),
    )
    assert fast.rounds > 2 * slow.rounds > 0


def test_ctrl_c_ends_with_the_summary_and_leaves_nothing(tmp_path):
    """Processes, folders and mounts of the rounds are gone; what was found until then decides the exit status."""
    words = [sys.executable, "-m", "torture", "--minutes", "10", "--only", "manifests"]
    env = {**os.environ, "PYTHONPATH": str(ROOT / "tools"), "TMPDIR": str(tmp_path)}
    with subprocess.Popen(words, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True) as torture:
        try:
            assert "seed" in torture.stdout.readline()
            time.sleep(0.5)
            torture.send_signal(signal.SIGINT)
            said = torture.stdout.read()
            assert torture.wait(timeout=20) in (0, 1)
        finally:
            torture.kill()
    assert "manifests" in said.splitlines()[-1] or "rounds," in said.splitlines()[-1]
    assert not list(tmp_path.iterdir())


def _exits(tell, how):
    tell("begun")
    if how == "exit":
        raise SystemExit(7)
    if how == "error":
        raise ValueError("wrong")
    if how == "wait":
        time.sleep(60)


@pytest.mark.parametrize("how, code", [("return", 0), ("exit", 7), ("error", 1)])
def test_child_of_an_attack_ends_as_python_does(tmp_path, how, code):
    """Its exit status is Python's, and its lines are read to the end."""
    with child(_exits, how, log=tmp_path / "log") as one:
        assert list(one.lines()) == ["begun"]
        assert one.wait() == code
        assert ("ValueError: wrong" in one.said()) == (how == "error")


def test_child_that_hangs_is_a_broken_promise_with_its_stack(tmp_path):
    """And it does not outlive the block."""
    with child(_exits, "wait", log=tmp_path / "log") as one:
        assert one.line() == "begun"
        with pytest.raises(Broken, match=r"(?s)child hangs.*in _exits"):
            one.line(seconds=0.2)
    assert one.wait() == -signal.SIGABRT
