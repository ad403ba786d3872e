"""The examples learn what their made-up data has to learn, from files too, and equal plain torch."""

from __future__ import annotations

import gzip
import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import speedswap
from speedswap.losses import Negatives, sampled_softmax

pytestmark = pytest.mark.usefixtures("one_thread")  # for such small layers
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_an_example_is_read_at_once(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= (220 if path.stem == "ngram_memory" else 150)


def test_recommender_learns_the_next_item(capsys: pytest.CaptureFixture[str]) -> None:
    """By chance an item would be among the best ten of about fifty in one of five cases."""
    found = example("sequence_recommender").main(["--epochs", "12", "--negatives", "32"])
    assert found["HR@10"] > 0.9
    assert found["NDCG@10"] > 0.6
    assert "epoch 12: loss" in capsys.readouterr().out


def test_recommender_reads_files_and_trains_a_larger_catalogue_on_disk(tmp_path: Path) -> None:
    """Two hundred thousand rows, of which data and negatives touch hundreds."""
    rows = [f"u{user}\ti{(user + step) % 40}\t5\t{step}\n" for user in range(40) for step in range(8)]
    with gzip.open(tmp_path / "ratings.tsv.gz", "wt") as file:
        file.writelines(reversed(rows))  # the order of lines is not that of time
    module = example("sequence_recommender")
    sequences = module.read(tmp_path / "ratings.tsv.gz")
    assert [len(each) for each in sequences] == [8] * 40
    more = ["--epochs", "1", "--items", "200000", "--dim", "8", "--users", "5"]
    module.main([str(tmp_path / "ratings.tsv.gz"), *more, "--path", str(tmp_path / "items")])
    with speedswap.Table.open(tmp_path / "items", "r") as table:
        assert len(table) == 200_001
        assert sorted(table.columns) == ["exp_avg", "exp_avg_sq", "weight"]


def test_graph_learns_its_circle() -> None:
    """By chance the filtered mean reciprocal rank among sixty entities would be below 0.1."""
    assert example("knowledge_graph").main(["--epochs", "12"]) > 0.7


def test_graph_reads_files(tmp_path: Path) -> None:
    (tmp_path / "train.tsv").write_text("a\tlikes\tb\nb\tlikes\tc\n")
    (tmp_path / "test.tsv").write_text("c\tknows\ta\n")
    edges, num_entities, num_relations = example("knowledge_graph").read(
        [tmp_path / "train.tsv", tmp_path / "test.tsv"]
    )
    assert [each.tolist() for each in edges] == [[[0, 0, 1], [1, 0, 2]], [[2, 1, 0]]]
    assert (num_entities, num_relations) == (3, 2)


def test_graph_trains_as_plain_torch() -> None:
    """All entities as negatives, each once, are the softmax of a dense layer; scores are those of complex numbers."""
    module = example("knowledge_graph")
    (edges, _), num_entities, num_relations = module.made_up(20)
    edges = module.with_reverses(edges, num_relations)
    rows, relations = (torch.randn(count, 6, dtype=torch.float64) for count in (num_entities, 2 * num_relations))
    ours = module.ComplEx(
        speedswap.Embedding.from_pretrained(rows, freeze=False),
        nn.Embedding.from_pretrained(relations.clone(), freeze=False),
    )
    theirs = module.ComplEx(*(nn.Embedding.from_pretrained(each.clone(), freeze=False) for each in (rows, relations)))
    for model in (ours, theirs):
        optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
        for heads, kinds, tails in (some.unbind(1) for some in edges.split(30)):
            queries = model(heads, kinds)
            if model is ours:
                loss = sampled_softmax(queries, tails, model.entities, Negatives(torch.arange(num_entities)))
            else:
                loss = F.cross_entropy(queries @ model.entities.weight.T, tails)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    torch.testing.assert_close(ours.entities.read(), theirs.entities.weight.detach(), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(ours.relations.weight, theirs.relations.weight, rtol=1e-10, atol=1e-10)
    heads, kinds, tails = edges[:9].unbind(1)
    h, r, t = (
        torch.complex(*each.detach().chunk(2, dim=1))
        for each in (theirs.entities(heads), theirs.relations(kinds), theirs.entities(tails))
    )
    scores = (ours(heads, kinds) * ours.entities(tails)).sum(1)
    torch.testing.assert_close(scores.detach(), (h * r * t.conj()).real.sum(1), rtol=1e-9, atol=1e-9)
    found = module.mean_reciprocal_rank(ours, edges[:5], edges, 2)
    assert found == pytest.approx(filtered_rank_by_hand(theirs, edges[:5], edges), rel=1e-6)


def filtered_rank_by_hand(model: nn.Module, edges: torch.Tensor, known: torch.Tensor) -> float:
    found = []
    for head, relation, tail in edges.tolist():
        scores = (model(torch.tensor([head]), torch.tensor([relation])) @ model.entities.weight.T)[0]
        others = {t for h, r, t in known.tolist() if (h, r) == (head, relation)}
        found.append(
            1 / (1 + sum(float(scores[row] > scores[tail]) for row in range(len(scores)) if row not in others))
        )
    return sum(found) / len(found)
