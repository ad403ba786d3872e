"""The commands ``speedswap dlrm`` and ``speedswap predict``."""

from __future__ import annotations

import argparse
import sys

from speedswap.apps.dlrm.criteo import SampleFiles, find_files
from speedswap.apps.dlrm.scores import Scores
from speedswap.apps.dlrm.settings import DlrmSettings
from speedswap.apps.dlrm.training import DlrmRun, load
from speedswap.apps.options import add_command, add_model_options, loaded_model
from speedswap.apps.saved_run import SavedRun

PREDICTED_AT_ONCE = 4096


def add_parsers(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add both commands to a parser's commands."""
    add_command(
        *(commands, "dlrm", DlrmSettings, run),
        summary="learn to predict clicks from samples in Criteo's format",
        description="Deep learning recommendation model (Naumov et al. 2019): learn to predict clicks from integers "
        "and categories. The tables of the categories and the optimizer's state live outside the compute device; ids "
        "get rows as they come. Some samples are set apart and predicted after every epoch. Ctrl-C or SIGTERM ends the "
        "training and saves a checkpoint.",
    )
    parser = commands.add_parser(
        "predict",
        help="the probability of a click for new rows, by a model of speedswap dlrm",
        description="Print the probability of a click that the best model of speedswap dlrm gives each row, one per "
        "line. Rows are those of Criteo's format, with a label or without. If they have labels, AUC and log loss are "
        "printed on standard error.",
    )
    add_model_options(parser)
    parser.add_argument("rows", nargs="+", metavar="ROWS", help="files as for speedswap dlrm, or patterns")
    parser.set_defaults(run=predict)


def run(args: argparse.Namespace) -> int:
    """Train, test, save and print the outcome; return the exit status."""
    DlrmSettings.refuse_beside(args, "samples", "generate", "ids")
    return DlrmRun.run_command(DlrmSettings.of(args), args)


def predict(args: argparse.Namespace) -> int:
    """Print the probabilities of rows; return the exit status."""
    SavedRun.best(DlrmRun.command, args.directory)  # before the rows: it may be a file of them
    rows, scores = SampleFiles(find_files(args.rows), labelled=None), Scores()
    with loaded_model(args, load) as model:
        device = next(model.top.parameters()).device
        while (samples := rows.read(PREDICTED_AT_ONCE)).size:
            logits = model.predict(samples.to(device)).cpu()
            sys.stdout.writelines(f"{probability:.6f}\n" for probability in logits.sigmoid().tolist())
            if len(samples.labels):
                scores.add(logits, samples.labels)
    if len(scores):
        print(f"{len(scores):,} rows: AUC {scores.auc:.4f}, log loss {scores.log_loss:.4f}", file=sys.stderr)
    return 0
