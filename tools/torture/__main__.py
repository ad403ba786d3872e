"""``python -m torture``: attack speedswap for a while, print what was found, and exit with 1 if anything was."""

from __future__ import annotations

import argparse
import json
import os
import secrets
import signal
import sys
from pathlib import Path

# Attack the speedswap of PYTHONPATH or of the installation, not a package in the working directory.
if not getattr(sys.flags, "safe_path", False) and sys.path[0] in ("", os.getcwd()):
    sys.path.append(sys.path.pop(0))

from torture.attack import Attack, attacks, named
from torture.run import Plan, as_json, as_table, play


def main(words: list[str] | None = None) -> int:
    options = _options().parse_args(words)
    chosen = named(options.only.split(",")) if options.only else attacks()
    if options.list:
        for attack in chosen:
            print(f"{attack.name:18} {attack.promise}")
        return 0
    # A stop by a scheduler ends with the summary too; a shell's background job starts with Ctrl-C ignored.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    plan = _plan(options, chosen)
    results = play(plan)
    print(as_table(results))
    if options.json:
        Path(options.json).write_text(json.dumps(as_json(results, plan), indent=1) + "\n")
    return 1 if any(result.findings for result in results) else 0


def _options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m torture", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0, help="how long, shared fairly among the attacks")
    parser.add_argument("--seed", type=int, help="of everything that is drawn; printed, and by chance by default")
    parser.add_argument("--only", default="", metavar="NAME,…", help="these attacks alone")
    parser.add_argument(
        "--rounds", type=int, metavar="N", help="this many rounds of each attack, however long it takes"
    )
    parser.add_argument("--quick", action="store_true", help="the few rounds of each attack that every test run plays")
    parser.add_argument("--repeat", metavar="NAME:SEED", help="one round again, as a finding names it")
    parser.add_argument("--list", action="store_true", help="print the attacks and what each holds speedswap to")
    parser.add_argument("--json", metavar="FILE", help="write the counts and the findings there too")
    return parser


def _plan(options: argparse.Namespace, chosen: list[Attack]) -> Plan:
    seed = secrets.randbelow(2**32) if options.seed is None else options.seed
    if options.repeat:
        name, _, number = options.repeat.partition(":")
        repeats = options.rounds or 1
        return Plan(named([name]), seed=seed, rounds={name: repeats}, repeated=int(number))
    if options.quick:
        return Plan(chosen, seed=seed, rounds={attack.name: attack.quick for attack in chosen})
    if options.rounds:
        return Plan(chosen, seed=seed, rounds={attack.name: options.rounds for attack in chosen})
    return Plan(chosen, seed=seed, seconds=60 * options.minutes)


if __name__ == "__main__":
    sys.exit(main())
