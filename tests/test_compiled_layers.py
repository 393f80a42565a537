"""Compiled decoder layers: lengths compile nothing, gradients stay, and a trial decides on a GPU."""

import pytest
import torch
from packed import computed
from tiny import forking_rows, qwen3
from torch._dynamo.utils import counters

from condensegrpo.algorithms.objective import PerToken, supervised
from condensegrpo.algorithms.packing import lay_out
from condensegrpo.config.checks import check_values
from condensegrpo.config.load import named_config, vary
from condensegrpo.core.errors import ConfigError
from condensegrpo.learner.layers import checkpoint_layers, compile_layers, try_compiling
from condensegrpo.learner.logprobs import CPU, TrainedLogprobs
from condensegrpo.learner.tree_attention import paths

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),  # optimizer_step does not show it either
]

BACKEND = "aot_eager"


def test_ten_lengths_are_one_graph_of_a_layer_without_a_break() -> None:
    """Micro-batches of trees with one to several buckets; the last layer's activations are kept, the first's not."""
    torch._dynamo.reset()
    counters.clear()
    plain, compiled, graphs = TrainedLogprobs(qwen3()), TrainedLogprobs(qwen3()), []
    compile_layers(compiled.policy, backend=BACKEND)
    checkpoint_layers(compiled.policy, 1)
    for count in (9, 3, 30, 7, 50, 12, 80, 21, 5, 40):
        batch = lay_out([tuple(forking_rows(count, seed=count))])
        for module in (plain, compiled):
            computed(module, batch, 0.9, objective=PerToken(supervised)).loss.backward()
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs == [1] * 10
    assert not counters["graph_break"]
    for expected, found in zip(plain.parameters(), compiled.parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad, rtol=1e-4, atol=1e-4 * float(expected.grad.abs().max()))


def test_compiled_attention_along_paths_drops_what_it_is_asked_to_drop() -> None:
    torch._dynamo.reset()
    query = torch.randn(1, 2, 6, 4, generator=torch.Generator().manual_seed(0))
    attend = paths([0, 1, 2, 3, 3, 1]).on(CPU).attend
    found = []
    for computed_by in (attend, torch.compile(attend, dynamic=True, backend="eager")):
        torch.manual_seed(1)
        found.append(computed_by(query, query, query, scaling=None, dropout=0.5))
    assert torch.equal(*found)
    assert not torch.allclose(found[1], attend(query, query, query, scaling=None))


def test_a_trial_compares_one_layer_and_says_why_layers_are_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("condensegrpo.learner.layers.ROW", 16)
    torch._dynamo.reset()
    found = try_compiling(qwen3().config, torch.float32, CPU, kernel="auto", backend=BACKEND)
    assert found.difference is not None
    assert found.difference < 1e-5
    assert found.compiled is not None
    assert ("are compiled:" in found.describe()) == (found.fault is None)
    broken = try_compiling(qwen3().config, torch.float32, CPU, kernel="auto", backend="no such compiler")
    assert "are not compiled: a trial failed: " in broken.describe()


def test_layers_whose_weights_are_gathered_inside_are_not_compiled() -> None:
    config = vary(named_config("quickstart"), ("learner.compile_layers=on", "learner.zero_stage=3"))
    with pytest.raises(ConfigError, match=r"compile_layers: found on, and learner.zero_stage is 3"):
        check_values(config)
