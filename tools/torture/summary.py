"""What a run of attacks comes to, for people and as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from torture.run import Plan, Result

__all__ = ["as_json", "as_table"]


def as_table(results: Sequence[Result]) -> str:
    """A line for each attack, its kinds of rounds below it, and how often each symptom was seen."""
    width = max((len(result.attack.name) for result in results), default=6)
    lines = ["", f"{'attack':{width}}  {'rounds':>7}  {'seconds':>7}  {'skipped':>7}  {'findings':>8}  kinds"]
    for result in sorted(results, key=lambda result: result.attack.name):
        kinds = ", ".join(f"{kind} {count}" for kind, count in sorted(result.kinds.items()))
        lines.append(
            f"{result.attack.name:{width}}  {result.rounds:7}  {result.seconds:7.0f}  {result.skipped.total():7}  "
            f"{len(result.findings):8}  {kinds}"
        )
    for result in results:
        for reason, count in result.skipped.most_common():
            lines.append(f"{result.attack.name}: skipped {count} times: {reason}")
    for result in results:
        for symptom, count in Counter(finding.symptom for finding in result.findings).most_common():
            first = next(finding for finding in result.findings if finding.symptom == symptom)
            lines.append(
                f"{result.attack.name}: {count} × {symptom}\n    first in round {first.number}, after "
                f"{first.seconds:.0f} s; again: {first.command}"
            )
    rounds, findings = sum(result.rounds for result in results), sum(len(result.findings) for result in results)
    return "\n".join([*lines, f"{rounds} rounds, {findings} findings"])


def as_json(results: Sequence[Result], plan: Plan) -> dict[str, Any]:
    """The same as plain data."""
    return {
        "seed": plan.seed,
        "attacks": {
            result.attack.name: {
                "rounds": result.rounds,
                "seconds": round(result.seconds, 1),
                "kinds": dict(result.kinds),
                "skipped": dict(result.skipped),
                "findings": [
                    {
                        "seed": finding.seed,
                        "round": finding.number,
                        "seconds": round(finding.seconds, 1),
                        "how": finding.how,
                        "symptom": finding.symptom,
                        "text": finding.text,
                    }
                    for finding in result.findings
                ],
            }
            for result in results
        },
    }
