"""Train word vectors by skip-gram with negative sampling over window blocks: the whole run, from text to vectors.

The command is ``speedswap word2vec``.
"""

from __future__ import annotations

import argparse
import importlib.util
import logging
import time
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.optim import Optimizer

import speedswap
from speedswap._words import pip_install
from speedswap.apps.errors import CheckpointError, CorpusError, OutputError, named
from speedswap.apps.files import check_output, save_somewhere
from speedswap.apps.options import add_command
from speedswap.apps.ranks import Job
from speedswap.apps.run import FOLDER, RESTART, ModelWithTables, Run, SavedRun, remove_checkpoints
from speedswap.apps.running import Shown, Stop, begun
from speedswap.apps.word2vec.blocks import BLOCK, START, BlockBatch, BlockPosition, PairWeights, Sampler
from speedswap.apps.word2vec.corpus import Corpus
from speedswap.apps.word2vec.settings import Word2VecSettings
from speedswap.apps.word2vec.vectors import Similarity, WordPairs, WordVectors, read_pairs
from speedswap.errors import SpeedswapError, TableFullError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_log = logging.getLogger("speedswap")


class SkipGram(ModelWithTables):
    """Two tables of word vectors, one for words as centers and one for words as contexts.

    Args:
        words: size of the vocabulary.
        settings: of the run. Tables on disk are in a temporary directory that goes with ``close``, or with the model.
        job: the ranks that own the rows, if they are more than one.

    Source: Mikolov et al., Distributed Representations of Words and Phrases and their Compositionality, 2013.
    """

    def __init__(self, words: int, settings: Word2VecSettings, job: Job | None = None) -> None:
        super().__init__()
        self.pair_weights = PairWeights(settings.window, settings.negative)
        place, self._remove_folder = (job or Job()).place_of_tables(self, settings.storage, settings.scratch)

        most, dtype = 0.5 / settings.dim, getattr(torch, settings.state_dtype)
        inits = {"center": speedswap.init.uniform(-most, most), "context": speedswap.init.zeros()}
        how = {"num_embeddings": words, "embedding_dim": settings.dim, "seed": settings.seed, "state_dtype": dtype}
        configs = [speedswap.EmbeddingConfig(name=name, init=init, **how) for name, init in inits.items()]
        self.words = speedswap.EmbeddingCollection(configs, storage=place)
        self.both: Any = self.words.groups[0]  # the tables as one, contexts after centers: one lookup, gather and step

    def forward(self, batch: BlockBatch) -> Tensor:
        """Return the batch's loss, summed over its pairs, or over those of a rank's share: a scalar."""
        return skip_gram_loss(self.both(batch.words), self.pair_weights(batch.reach), self.pair_weights.signs)


def skip_gram_loss(vectors: Tensor, weights: Tensor, signs: Tensor) -> Tensor:
    """Return the sum of -log σ(score) over the pairs and of -log σ(-score) over the negatives.

    Args:
        vectors: those of all blocks' centers, then those of their contexts, shape (blocks * (BLOCK + words), dim).
        weights: of the scores, shape (blocks, BLOCK, words); not differentiated.
        signs: -1 for a word in a pair, 1 for a negative, shape (words,).
    """
    loss: Tensor = _SkipGramLoss.apply(vectors, weights, signs)  # type: ignore[no-untyped-call]
    return loss


class _SkipGramLoss(torch.autograd.Function):
    """The loss with a hand-written gradient: that of the scores is computed in place, in one pass with the loss."""

    @staticmethod
    def forward(ctx: Any, vectors: Tensor, weights: Tensor, signs: Tensor) -> Tensor:
        centers, contexts = _by_block(vectors, weights)
        scores = torch.bmm(centers, contexts.transpose(1, 2)).mul_(signs)
        weights = weights.to(scores.dtype)
        loss = torch.dot(F.softplus(scores).flatten(), weights.flatten())
        of_scores = scores.sigmoid_().mul_(weights)
        ctx.save_for_backward(vectors, of_scores, signs)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        vectors, of_scores, signs = ctx.saved_tensors
        of_scores = of_scores * (signs * grad)
        of_vectors = torch.empty_like(vectors)
        (centers, contexts), (of_centers, of_contexts) = (_by_block(each, of_scores) for each in (vectors, of_vectors))
        torch.bmm(of_scores, contexts, out=of_centers)
        torch.bmm(of_scores.transpose(1, 2), centers, out=of_contexts)
        return of_vectors, None, None


def _by_block(vectors: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return views of the centers' vectors and of the contexts', shape (blocks, words of a block, dim)."""
    (blocks, centers, words), dim = weights.shape, vectors.shape[1]
    of_centers, of_contexts = vectors.split_with_sizes([blocks * centers, blocks * words])
    return of_centers.view(blocks, centers, dim), of_contexts.view(blocks, words, dim)


LOSS_POINTS = 500
SECONDS_BETWEEN_LOOKS = 1.0


class Word2VecRun(Run[Word2VecSettings, BlockBatch]):
    """Skip-gram with negative sampling on a corpus.

    A full disk of the tables ends a run of one process early, with ``interrupted`` and ``failure`` set; the vectors are
    those after the last step that fitted. Training goes on where there is no room for a checkpoint. The command deletes
    the checkpoints once the vectors are written.

    Attributes:
        vectors: the vectors.
        steps: steps taken, with those before a resumption.
        corpus_words: words of the corpus, unknown ones included.
        missed: occurrences of any word, at most, that were not counted, as more than max_types were different.
        vocabulary_seconds: the time to read and count the corpus.
        batch: centers per step.
        trained_words: words trained on, unknown ones included: epochs × corpus_words, or less after Ctrl-C.
        pairs: pairs of a center and a context trained on.
        loss: trained words, and the mean loss of a pair, with its negatives, since the entry before.
        similarities: agreements with human judgement, if they were asked for.
        failure: set where the tables' disk filled up.

    Raises:
        CorpusError: the corpus cannot be read, or has nothing to learn from.

    Source: Mikolov et al., Distributed Representations of Words and Phrases and their Compositionality, 2013.
    """

    command = "word2vec"
    deciding = (
        *("dim", "window", "negative", "min_count", "sample", "epochs", "optimizer", "lr", "batch"),
        *("state_dtype", "seed"),
    )  # the corpus is compared by its vocabulary
    plot, plot_size = "loss.png", (7, 4)
    unit = " words"

    model: SkipGram
    vectors: WordVectors

    def __init__(self, settings: Word2VecSettings, job: Job | None = None) -> None:
        super().__init__(settings, job)
        self.vocabulary_seconds = self.trained_words = 0.0
        self.steps = self.pairs = self.missed = 0
        self.loss: list[tuple[float, float]] = []
        self.similarities: Sequence[Similarity] = ()
        self.failure: TableFullError | None = None
        self._position = START
        self._meter = Meter(self)

    def read(self) -> None:
        started = time.perf_counter()
        self._corpus = self.closing.enter_context(open_corpus(self.settings))
        self.vocabulary_seconds = time.perf_counter() - started
        self.corpus_words, self.missed = self._corpus.corpus_words, self._corpus.missed
        self.total = self.settings.epochs * self.corpus_words
        if self.job.size == 1:
            self.settings = self.settings.placed(len(self._corpus.vocabulary))
        self.batch = self.settings.batch or self.settings.suited.batch_for(self.corpus_words, self.device)

    def make_model(self) -> SkipGram:
        model = SkipGram(len(self._corpus.vocabulary), self.settings, self.job)
        self.vectors = WordVectors(self._corpus.vocabulary, model.words.tables["center"])
        return model

    @property
    def done(self) -> float:
        return self.trained_words

    @property
    def count(self) -> int:
        return self.steps

    @property
    def words_per_second(self) -> float:
        """Words of the corpus trained on per second; 0 if the first step failed."""
        return self.trained_words / self.training_seconds if self.trained_words else 0.0

    def batches(self) -> Iterable[BlockBatch]:
        settings = self.settings
        drawn: dict[str, Any] = {"window": settings.window, "sample": settings.sample, "seed": settings.seed}
        sampler = Sampler(self._corpus, self.device, **drawn, job=self.job)
        batches = sampler.batches(settings.epochs, -(-self.batch // BLOCK), self._position)
        words = {self.model.both: lambda batch: batch.words}
        return speedswap.lookahead(batches, words, depth=settings.lookahead_depth())

    def lr_left(self) -> float:
        return self.settings.suited.lr_left(self.done / self.total)

    def take(self, batch: BlockBatch) -> None:
        loss = step(self.model, self.optimizer, batch)
        self.steps += 1
        self.trained_words += batch.corpus_words
        self._position = batch.next
        self.epoch, self.step = batch.next.epoch, batch.next.batch
        self._meter.add(loss, batch.pairs)

    def note(self) -> str:
        return f"loss={self.loss[-1][1]:.3f}" if self.loss else ""

    def evaluate(self) -> None:
        self.epoch, self.step, self.trained_words = self.settings.epochs, 0, self.total

    def fail(self, error: SpeedswapError, output: Path | None) -> None:
        if not isinstance(error, TableFullError) or self.job.size > 1:  # other ranks may have taken the step
            raise error
        self.failure = error  # the tables hold the state after the last completed step

    def loop(self, output: Path | None, shown: Shown) -> None:
        super().loop(output, shown)
        self._meter.close()
        if not self.pairs and not self.interrupted:
            raise CorpusError(
                f"{named('sample')}={self.settings.sample} left no two words of any line of {self._corpus.path}: "
                "raise it, or give 0 for all"
            )

    # ------------------------------------------------------------------ checkpoints

    def save(self, output: Path | None) -> None:
        try:
            super().save(output)
        except OutputError as error:
            _log.warning("no checkpoint: %s", error)

    def state(self) -> dict[str, Any]:
        return {
            "meter": self._meter.state(),  # first: reads the loss and the pairs
            "course": (self.trained_words, self.pairs, self.training_seconds, self.loss),
            "position": tuple(self._position),
            "device": self.device.type,
            "corpus": self._corpus.checksum,
            "steps": self.steps,
        }

    def restore(self, content: dict[str, Any]) -> None:
        super().restore(content)
        self._meter.restore(content["meter"])
        self.trained_words, self.pairs, self.training_seconds, self.loss = content["course"]
        self._position = BlockPosition(*content["position"])
        self.steps = content["steps"]

    def check(self, saved: SavedRun) -> None:
        super().check(saved)
        if self._corpus.checksum != saved.content["corpus"]:
            raise CheckpointError(
                f"corpus {self._corpus.path} is not that of the checkpoint {saved.folder}: give the same, or {RESTART}"
            )
        if self.device.type != saved.content["device"]:
            raise CheckpointError(
                f"{named('device')} is {self.device.type}, but the checkpoint {saved.folder} is of a run on "
                f"{saved.content['device']}, which draws other numbers: give the same, or {RESTART}"
            )

    def said_of(self, saved: SavedRun) -> str:
        return f"after {self.trained_words:,.0f} words, by {saved.folder}; --restart starts over"

    # ------------------------------------------------------------------ results

    def write_model(self, folder: Path) -> list[Path]:
        self.vectors.save(folder / "vectors.txt")
        return [folder / "vectors.txt"]

    def figures(self) -> dict[str, Any]:
        return {
            "corpus_words": self.corpus_words,
            "missed": self.missed,
            "vocabulary": len(self.vectors),
            "vocabulary_seconds": round(self.vocabulary_seconds, 3),
            "trained_words": round(self.trained_words),
            "pairs": self.pairs,
            "words_per_second": round(self.words_per_second),
            "table": repr(self.vectors.table),
            "similarity": [each.to_json() for each in self.similarities],
            "loss": [{"words": round(words), "loss": loss} for words, loss in self.loss],
        }

    def report(self) -> dict[str, Any]:
        found = super().report()
        found["settings"]["batch"] = self.batch
        return found

    def draw(self, figure: Figure) -> None:
        axes = figure.subplots()
        axes.plot(*zip(*self.loss, strict=True))
        axes.set_xlabel("words trained on")
        axes.set_ylabel("loss per pair")
        axes.set_title(f"{len(self.vectors):,} word vectors, {self.settings.optimizer}")
        axes.grid(alpha=0.3)


def step(model: SkipGram, optimizer: Optimizer, batch: BlockBatch) -> Tensor:
    """Take one training step; return the batch's summed loss."""
    loss: Tensor = model(batch)
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


class Meter:
    """A running sum of losses and pairs on their device, read into the run now and then, over all ranks.

    Args:
        run: to record them in.
    """

    def __init__(self, run: Word2VecRun) -> None:
        self._run = run
        # Reading waits for a GPU. Ranks read after the same steps.
        self._seconds = 0.0 if run.device.type == "cpu" or run.job.size > 1 else SECONDS_BETWEEN_LOOKS
        self._looked = time.perf_counter()
        self._sums: list[Tensor] = []
        """Losses and pairs since the last entry."""
        self._unread: list[tuple[float, list[Tensor]]] = []

    def add(self, loss: Tensor, pairs: Tensor) -> None:
        """Add a step, which the run's ``trained_words`` already counts."""
        self._sums = [self._sums[0] + loss, self._sums[1] + pairs] if self._sums else [loss, pairs]
        points = len(self._run.loss) + len(self._unread)
        if self._run.trained_words >= (points + 1) * self._run.total / LOSS_POINTS:
            self._put_down()
            if time.perf_counter() - self._looked >= self._seconds:
                self._look()

    def state(self) -> list[Tensor]:
        """Return what was added since the last entry, for a checkpoint; the entries before are read."""
        self._look()
        if not self._sums:
            return []
        loss, pairs = self._sums
        (total,) = self._run.job.add_up(loss.item())
        return [loss.new_tensor(total), pairs]

    def restore(self, state: list[Tensor]) -> None:
        """Go on from what :meth:`state` has returned."""
        self._sums = [value.to(self._run.device) for value in state]
        if self._sums and not self._run.job.leads:
            self._sums[0].zero_()

    def close(self) -> None:
        """Read the rest."""
        self._put_down()
        self._look()

    def _put_down(self) -> None:
        if self._sums:
            self._unread.append((self._run.trained_words, self._sums))
        self._sums = []

    def _look(self) -> None:
        run = self._run
        if self._unread:
            sums = torch.stack([torch.stack([sum_.double() for sum_ in sums]) for _, sums in self._unread]).tolist()
            for (words, _), (ours, pairs) in zip(self._unread, sums, strict=True):
                (loss,) = run.job.add_up(ours)
                if pairs:
                    run.pairs += round(pairs)
                    run.check_loss(loss / pairs, f"after {words:,.0f} words", ("lr", "batch"))
                    run.loss.append((words, loss / pairs))
        self._unread.clear()
        self._looked = time.perf_counter()


# ---- the corpus --------------------------------------------------------------------------------------


def open_corpus(settings: Word2VecSettings) -> Corpus:
    """Read the text that the settings name, or generate one."""
    if settings.generate is not None:
        return Corpus.generated(
            settings.generate, min_count=settings.min_count, seed=settings.seed, scratch=settings.scratch
        )
    return Corpus(
        settings.corpus or demo_corpus(),
        min_count=settings.min_count,
        plain_words=settings.plain_words or settings.corpus is None,
        max_types=settings.max_types,
        scratch=settings.scratch,
    )


def demo_corpus() -> Path:
    """Return the news corpus (300 articles, 60,000 words) in gensim's test data.

    Raises:
        CorpusError: gensim is not installed, or comes without its test data.
    """
    gensim = importlib.util.find_spec("gensim")
    for folder in (gensim.submodule_search_locations or []) if gensim else []:
        path = Path(folder, "test", "test_data", "lee_background.cor")
        if path.is_file():
            return path
    raise CorpusError(
        f"no corpus given, and the demo corpus comes with gensim: {pip_install('gensim', extra='demo')}; "
        "or give a text file"
    )


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to a parser's commands."""
    parser = add_command(
        *(commands, "word2vec", Word2VecSettings, run),
        summary="train word vectors on text",
        description="Train word vectors on text by skip-gram with negative sampling. The tables and the optimizer's "
        "state live outside the compute device. Ctrl-C or SIGTERM ends the training and saves the vectors so far. A "
        "run that was ended, or killed, goes on from its last checkpoint when it is started again.",
    )
    parser.add_argument(
        "--eval",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="word pairs with human similarity, separated by tabs, to compare with; may be given several times",
    )
    parser.add_argument(
        "--nearest",
        type=lambda text: text.replace(",", " ").split(),
        metavar="WORDS",
        help="print the nearest neighbours of these words, separated by commas (default: a few from the corpus)",
    )


def run(args: argparse.Namespace) -> int:
    """Train, compare, save and print the outcome; return the exit status."""
    settings = Word2VecSettings.of(args)
    check_output(args.output, FOLDER)
    compared = [read_pairs(path) for path in args.eval]
    with begun(settings.compute_device()) as (job, stop):
        result = Word2VecRun.train(settings, output=args.output, resume=args.resume, stop=stop)
        job.lead(result.vectors.table, partial(finish, result, args, compared, stop))
        return stop.status_of(result.interrupted)


def finish(
    result: Word2VecRun, args: argparse.Namespace, compared: Sequence[WordPairs], stop: Stop, table: speedswap.Table
) -> None:
    """Compare, save and print a run's outcome, with the vectors of a table."""
    result.vectors = WordVectors(result.vectors.words, table)
    result.similarities = [result.vectors.similarity(pairs) for pairs in compared]
    files = save_somewhere(args.output, result.write, args.scratch)
    if not result.interrupted:
        remove_checkpoints(args.output)
    trained = f"{result.trained_words:,.0f} words of text"
    print(
        f"{len(result.vectors):,} words of {table.embedding_dim} dimensions from {trained} in "
        f"{result.training_seconds:.1f} s: {result.words_per_second:,.0f} words/s, loss {result.loss[-1][1]:.3f}"
        if result.loss
        else "stopped before the first words"
    )
    if result.missed:
        print(f"with more than {result.settings.max_types:,} different words: counts lack up to {result.missed:,} each")
    for word in args.nearest or telling_words(result.vectors.words):
        near = result.vectors.nearest(word) if word in result.vectors else None
        said = "not in the vocabulary" if near is None else ", ".join(f"{each} {cosine:.2f}" for each, cosine in near)
        print(f"{word}: {said}")
    for similarity in result.similarities:
        print(similarity)
    saved = f"the vectors after {trained} are saved"
    if result.failure is None and result.interrupted:
        print(f"{stop.word}: {saved}; the same command goes on from there")
    print("saved", ", ".join(map(str, files)))
    if result.failure is not None:
        raise OutputError(f"{result.failure}; {saved}")


def telling_words(words: Sequence[str], count: int = 6) -> Sequence[str]:
    """Choose a few words that are common, but not so common that any word is near them."""
    middling = [word for word in words[min(len(words) // 10, 200) :] if len(word) > 3]
    return middling[: count * 10 : 10]
