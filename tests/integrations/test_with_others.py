"""PyTorch Geometric, TorchRec, gensim, faiss, trackers and Ray, as the pages use them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from integrations.pages import PAGES, run_page

import speedswap

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("default")]


def needs(*packages: str) -> None:
    for package in packages:
        pytest.importorskip(package, reason=f"{package} is not installed")


def test_part_of_a_graph_gives_the_vectors_of_the_whole_graph() -> None:
    needs("torch_geometric")
    from torch_geometric.nn import LightGCN

    page = run_page("pyg")
    theirs = LightGCN(3000, 16, num_layers=2)
    theirs.embedding.weight.data.copy_(page["items"].read())
    whole = theirs.get_embedding(page["edges"])
    batch = torch.tensor([5, 17, 2999])
    torch.testing.assert_close(page["embed"](batch), whole[batch])
    page["optimizer"].zero_grad()
    page["embed"](batch).square().sum().backward()
    whole[batch].square().sum().backward()
    touched = theirs.embedding.weight.grad.abs().sum(1) > 0
    torch.testing.assert_close(page["items"].weight.grad, theirs.embedding.weight.grad[touched])


def test_feature_store_is_the_table() -> None:
    needs("torch_geometric")
    page = run_page("pyg")
    features, papers = page["features"], page["papers"]
    assert torch.equal(page["x"][0], papers.read(3, 4)[0])
    assert torch.equal(page["x"][0], page["x"][2])
    assert not papers.read(5, 7).any()
    assert torch.equal(features["paper", "x", 2:6], papers.read(2, 6))
    assert features.get_tensor_size(group_name="paper", attr_name="x") == (1_000_000, 16)
    assert [attr.group_name for attr in features.get_all_tensor_attrs()] == ["paper"]


@pytest.mark.filterwarnings("ignore")
def test_torchrecs_pipeline_trains_both_collections() -> None:
    needs("fbgemm_gpu", "torchrec")
    page = run_page("torchrec")
    trained = page["model"]
    for ahead in (False, True):
        model = page["Clicks"]()
        optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
        ids = {model.large: lambda given: given.features.permute([0, 1])}
        for batch in speedswap.lookahead(page["made"], ids, depth=int(ahead)):
            optimizer.zero_grad()
            model(batch)[0].backward()
            optimizer.step()
        assert model.state_dict().keys() == trained.state_dict().keys()
        assert all(torch.equal(each, trained.state_dict()[name]) for name, each in model.state_dict().items())
    features = page["made"][0].features.permute([0, 1])
    assert torch.equal(page["theirs"](features).values(), page["model"].large(features).values())


def test_gensims_vectors_come_in_and_go_out() -> None:
    needs("gensim")
    page = run_page("gensim")
    items, vectors, trained = page["items"], page["vectors"], page["trained"]
    assert np.array_equal(items(["word5", "word997"]).detach().numpy(), vectors[["word5", "word997"]])
    assert trained.index_to_key == vectors.index_to_key
    assert np.array_equal(trained["word5"], vectors["word5"])
    assert not np.array_equal(trained["word3"], vectors["word3"])
    assert np.array_equal(page["again"]["word3"], vectors["word3"])


def test_faiss_finds_rows_of_the_table() -> None:
    needs("faiss")
    page = run_page("faiss")
    assert page["index"].ntotal == 50_000
    hits = [
        len({*found} & {*exact}) for found, exact in zip(page["ids"].tolist(), page["exact_ids"].tolist(), strict=True)
    ]
    assert sum(hits) >= 20  # of 40, from a quarter of the lists
    flat = page["faiss"].IndexFlatIP(16)
    flat.add(page["items"].read().numpy())
    assert np.array_equal(flat.search(page["queries"].numpy(), 10)[1], page["exact_ids"].numpy())


def test_tensorboard_gets_figures_of_tables() -> None:
    needs("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run_page("trackers", "SummaryWriter")
    events = EventAccumulator("logs").Reload()
    assert [event.value for event in events.Scalars("tables/0/writes")] == [1, 2, 3]
    assert [event.step for event in events.Scalars("tables/0/log_bytes")] == [0, 1, 2]
    assert len(events.Scalars("loss")) == 3


def test_mlflow_gets_figures_of_tables(tmp_path: Path) -> None:
    needs("mlflow")
    import mlflow

    mlflow.set_tracking_uri(f"sqlite:///{tmp_path}/mlflow.db")
    scalars = run_page("trackers", "class Scalars")
    with mlflow.start_run() as run:
        mlflow.log_metrics(speedswap.monitor.table_metrics(speedswap.Embedding(10, 2, name="items")), step=7)
        recorder = speedswap.monitor.SplitRecorder(scalars["Scalars"]())
        splitter = speedswap.BatchSplitter(micro_batch_size=2, callbacks=[recorder])
        weight = torch.ones((), requires_grad=True)
        splitter.backward(lambda x: (weight * x).mean(), torch.ones(4))
    found = mlflow.get_run(run.info.run_id).data.metrics
    assert found["tables/items/bytes"] == 80
    assert found["loss"] == 1


@pytest.mark.release
@pytest.mark.slow
@pytest.mark.timeout(600)  # Ray starts in a minute on a quiet machine with two cores, and in five on a busy one
def test_rays_workers_own_a_table_together() -> None:
    needs("ray")
    pytest.importorskip("ray.train", reason="pip install 'ray[train]'")
    assert run_page("ray")["loaded"].step == 3


def test_every_page_is_in_the_table_of_pages() -> None:
    text = (PAGES / "README.md").read_text()
    assert {path.name for path in PAGES.glob("*.md")} - {"README.md"} == {
        path.name for path in PAGES.glob("*.md") if f"({path.name})" in text
    }
