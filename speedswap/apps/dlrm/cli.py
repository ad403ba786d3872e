"""The commands ``speedswap dlrm`` and ``speedswap predict``, and the files of a run other than its checkpoints."""

from __future__ import annotations

import argparse
import math
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from speedswap.apps import options
from speedswap.apps.checkpoints import FOLDER, add_resume
from speedswap.apps.dlrm.checkpoint import DLRMCheckpoint, load
from speedswap.apps.dlrm.criteo import SampleFiles, find_files
from speedswap.apps.dlrm.scores import Scores
from speedswap.apps.dlrm.settings import DlrmSettings
from speedswap.apps.dlrm.training import DlrmResult, train
from speedswap.apps.output import add_output, check_output, check_scratch, save_results, versions
from speedswap.apps.running import Stop, begun

if TYPE_CHECKING:
    from matplotlib.figure import Figure


PREDICTED_AT_ONCE = 4096
FEW = 100
"""Tested samples of a label: with fewer, the AUC has a standard error of 0.03 or more."""


def add_parsers(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add both commands to a parser's commands."""
    parser = commands.add_parser(
        "dlrm",
        help="learn to predict clicks from samples in Criteo's format",
        description="Deep learning recommendation model (Naumov et al. 2019): learn to predict clicks from integers "
        "and categories. The tables of the categories and the optimizer's state live outside the compute device; ids "
        "get rows as they come. Some samples are set apart and predicted after every epoch. Ctrl-C or SIGTERM ends the "
        "training and saves a checkpoint.",
    )
    DlrmSettings.add_arguments(parser)
    add_output(parser, "dlrm-output")
    add_resume(parser)
    parser.set_defaults(run=run)
    parser = commands.add_parser(
        "predict",
        help="the probability of a click for new rows, by a model of speedswap dlrm",
        description="Print the probability of a click that the best model of speedswap dlrm gives each row, one per "
        "line. Rows are those of Criteo's format, with a label or without. If they have labels, AUC and log loss are "
        "printed on standard error.",
    )
    parser.add_argument("directory", type=Path, metavar="DIR", help="the run's output directory")
    parser.add_argument("rows", nargs="+", metavar="ROWS", help="files as for speedswap dlrm, or patterns")
    parser.add_argument("--storage", default="auto", help=options.STORAGE_TEXT)
    parser.add_argument("--scratch", type=Path, metavar="DIR", help="directory for tables on disk, which are temporary")
    parser.add_argument("--device", help=options.DEVICE_TEXT)
    parser.set_defaults(run=predict)


def run(args: argparse.Namespace) -> int:
    """Train, test, save and print the outcome; return the exit status."""
    DlrmSettings.refuse_beside(args, "samples", "generate", "ids")
    settings = DlrmSettings.of(args)
    check_output(args.output, FOLDER)
    with begun(settings.compute_device()) as (job, stop):
        result = train(settings, output=args.output, resume=args.resume, stop=stop)
        return finish(result, args.output, stop) if job.leads else stop.status_of(result.interrupted)


def finish(result: DlrmResult, output: Path, stop: Stop) -> int:
    """Save and print a run's outcome; return the exit status."""
    files = save(result, output)
    best = result.best
    if result.samples:
        print(
            f"{result.samples:,} samples in {result.training_seconds:.1f} s: "
            f"{result.samples / result.training_seconds:,.0f} samples/s"
        )
    if best is not None:
        print(
            f"{result.tested_samples:,} samples tested, {result.base_rate:.2%} of them clicks; predicting that for "
            f"each gives log loss {result.base_loss:.4f}"
        )
        print(f"best of {len(result.evaluations)}: {best}")
        warn_of_few(result)
    result.model.embeddings.close()
    return stop.report(result.interrupted, [*files, output / FOLDER])


def warn_of_few(result: DlrmResult) -> None:
    """Warn on standard error if the evaluation has too few samples of either label."""
    clicks = round(result.base_rate * result.tested_samples)
    others = result.tested_samples - clicks
    if min(clicks, others) < FEW:
        error = math.sqrt((clicks + others + 1) / (12 * clicks * others)) if clicks and others else math.inf
        print(
            f"warning: {clicks:,} clicks and {others:,} other samples were tested, too few to judge the model"
            + (f": an AUC of chance has a standard error of {error:.2f}" if error < math.inf else "")
            + f"; give more samples, at least {FEW} of either label",
            file=sys.stderr,
        )


def predict(args: argparse.Namespace) -> int:
    """Print the probabilities of rows; return the exit status."""
    options.one_of(options.STORAGES)("storage", args.storage)
    check_scratch(args.scratch)
    device = options.compute_device(args.device)
    DLRMCheckpoint.best(args.directory)  # before the rows: it may be a file of them
    rows = SampleFiles(find_files(args.rows), labelled=None)
    model = load(args.directory, storage=args.storage, scratch=args.scratch).to(device)
    scores = Scores()
    try:
        while (samples := rows.read(PREDICTED_AT_ONCE)).size:
            logits = model.predict(samples.to(device)).cpu()
            sys.stdout.writelines(f"{probability:.6f}\n" for probability in logits.sigmoid().tolist())
            if len(samples.labels):
                scores.add(logits, samples.labels)
    finally:
        model.embeddings.close()
    if len(scores):
        print(f"{len(scores):,} rows: AUC {scores.auc:.4f}, log loss {scores.log_loss:.4f}", file=sys.stderr)
    return 0


def save(result: DlrmResult, folder: Path) -> list[Path]:
    """Write ``run.json`` and, where matplotlib is installed, ``training.png``.

    Returns:
        The files written.

    Raises:
        OutputError: a file cannot be written.
    """
    return save_results(folder, figures(result), plot=("training.png", partial(draw, result)), size=(9, 4))


def figures(result: DlrmResult) -> dict[str, Any]:
    """Return the run's settings and figures, as JSON can hold them."""
    settings = result.settings
    return {
        "settings": settings.to_json(
            **{name: list(getattr(settings, name)) for name in ("samples", "test", "bottom", "top")},
            lr=result.lr,
            device=str(settings.compute_device()),
        ),
        "samples": result.samples,
        "training_seconds": round(result.training_seconds, 3),
        "samples_per_second": round(result.samples / result.training_seconds) if result.samples else None,
        "tested_samples": result.tested_samples,
        "base_rate": finite(result.base_rate),
        "base_log_loss": finite(result.base_loss),
        "curve": [{**point._asdict(), "auc": finite(point.auc)} for point in result.curve],
        "evaluations": [{**each._asdict(), "auc": finite(each.auc)} for each in result.evaluations],
        "best": {**result.best._asdict(), "auc": finite(result.best.auc)} if result.best is not None else None,
        "interrupted": result.interrupted,
        "processes": result.job.size,
        "ids": result.model.embeddings.known(),
        "tables": [repr(table) for table in result.model.embeddings.stores()],
        "versions": versions(),
    }


def finite(value: float) -> float | None:
    return value if math.isfinite(value) else None  # JSON has no NaN


def draw(result: DlrmResult, figure: Figure) -> None:
    """Plot loss and AUC over the samples trained on."""
    evaluations = result.evaluations
    for axes, name, of_point, of_test, guessed in zip(
        figure.subplots(1, 2),
        ("log loss (lower is better)", "AUC (higher is better)"),
        ("loss", "auc"),
        ("log_loss", "auc"),
        (result.base_loss, 0.5),
        strict=True,
    ):
        axes.plot(
            [point.samples for point in result.curve],
            [getattr(point, of_point) for point in result.curve],
            ".-",
            label="training samples, each predicted before its step",
        )
        axes.plot(
            [each.samples for each in evaluations],
            [getattr(each, of_test) for each in evaluations],
            "o",
            label=f"{result.tested_samples:,} test samples",
        )
        axes.axhline(guessed, color="gray", linestyle="--", label="the same prediction for every sample")
        axes.set_xlabel("samples trained on")
        axes.set_ylabel(name)
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    figure.suptitle(f"Click prediction in the course of training, with {result.settings.optimizer}")
