"""The lookups stay out of compiled graphs, and nothing of the compiler is imported for that."""

from __future__ import annotations

from children import run_script


def in_a_new_process(code: str) -> None:
    result = run_script(code, imported=("torch",))
    assert result.returncode == 0, result.stderr


def test_a_lookup_does_not_import_the_compiler() -> None:
    in_a_new_process(
        """
        import sys, torch, speedswap
        bags = speedswap.EmbeddingBag(10, 4, seed=1)
        assert torch.equal(speedswap.Embedding(10, 4, seed=1)(torch.tensor([[3]])), bags(torch.tensor([[3]]))[None])
        assert "torch._dynamo" not in sys.modules
        """
    )


def test_the_first_lookup_may_be_that_of_a_compiled_model() -> None:
    in_a_new_process(
        """
        import torch, speedswap
        graphs = []

        def backend(graph, inputs):
            graphs.append([node.target for node in graph.graph.nodes if node.op == "call_function"])
            return graph.forward

        class Model(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.items, self.bags = speedswap.Embedding(50, 4, seed=1), speedswap.EmbeddingBag(50, 4, seed=2)

            def forward(self, ids):
                return torch.sin(self.items(ids)).sum() + torch.cos(self.bags(ids[None])).sum()

        model = Model()
        compiled = torch.compile(model, backend=backend)
        for count in range(1, 12):
            assert torch.equal(compiled(torch.arange(count)), model(torch.arange(count))), count
        assert {target for graph in graphs for target in graph} >= {torch.sin, torch.cos}
        assert not any("speedswap" in str(getattr(target, "__module__", "")) for graph in graphs for target in graph)
        found = [target for graph in graphs for target in graph]
        assert torch.nn.functional.embedding not in found and torch.unique not in found
        """
    )
